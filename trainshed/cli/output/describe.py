"""Text output of the choices for a run, and of the score of its forecast."""

from collections.abc import Iterable, Mapping
from typing import Any

from trainshed import Line
from trainshed.cli.output.printing import show_facts, show_table, show_text

_WHY = {
    "plan": "the largest that fits by the plan",
    "kept": "as the worker group before",
    "out_of_memory": "because a larger one ran out of memory",
}


def show_built(built: Line, micro_batch: Line | None, *, tree: bool) -> None:
    """Print the event `model_built`, and the micro-batch if the workers have chosen it.

    With `tree`, print also the module tree, in which the names of units begin with FSDP.
    """
    chunk, trains = built["loss_chunk_tokens"], bool(built["optimizer_groups"])
    loss = "all logits at once" if chunk is None else f"in chunks of {chunk} tokens"
    show_facts(
        {
            "mesh": _pairs(built["mesh"]),
            "hosts": "; ".join(f"{host}: {_ranks(ranks)}" for host, ranks in _items(built["hosts"])),
            "dtypes": _pairs(built["dtypes"]),
            "attention": built["attention"],
            "loss": loss if trains else None,
            "micro-batch": None if micro_batch is None else _micro_batch(micro_batch),
            "checkpointing": built["checkpointing"] if trains else None,
            "parameters": _parameters(built, trains=trains),
            "cores of a rank": built["cores"],
            "backend": built["backend"],
        }
        | float8_facts(built.get("float8"))
    )
    show_text("")
    show_units(built["units"])
    if trains:
        show_text("")
        show_groups(built["optimizer_groups"])
    if tree:
        show_tree(str(built["tree"]))


def _micro_batch(chosen: Line) -> str:
    because = str(chosen["because"])
    return f"{chosen['size']}, {_WHY.get(because, because)}"


def _parameters(built: Line, *, trains: bool) -> str | None:
    """Return the parameters, with the trained ones if some are frozen; None in runs of older versions."""
    every, trained = built.get("parameters"), built.get("trained_parameters")
    if not isinstance(every, int) or not isinstance(trained, int):
        return None
    return f"{every:,}" if trained == every or not trains else f"{every:,}, of which {trained:,} are trained"


def float8_facts(found: Any) -> dict[str, str]:
    """Return the linear layers in float8, as facts; none without them. `found` is a mapping of an event or a plan."""
    if not found:
        return {}
    kept = f"; not {', '.join(found['left_out'])}" if found["left_out"] else ""
    how = ", emulated" if found.get("emulated") else ""
    return {"float8": f"{found['linears']} linear layers, {found['scaling']}{how}{kept}"}


def show_units(units: Any) -> None:
    """Print FSDP units, one class and size per row; `units` are the mappings of an event or of a plan."""
    rows: Iterable[Mapping[str, Any]] = units
    show_table(
        ("FSDP unit", "count", "parameters of one", "MiB of one", "dtype"),
        (
            (one["module"], str(one["count"]), f"{one['parameters']:,}", f"{one['bytes'] / 2**20:,.1f}", one["dtype"])
            for one in rows
        ),
    )


def show_groups(groups: Any) -> None:
    """Print parameter groups, one per row; `groups` are the mappings of an event or of a plan."""
    rows: list[Mapping[str, Any]] = list(groups)
    wanted = ("optimizer", "name", "lr", "weight_decay", "beta1", "beta2", "tensors", "parameters")
    names = [name for name in wanted if any(name in row for row in rows)]
    show_table(names, ([_cell(row.get(name, "")) for name in names] for row in rows))


def _cell(value: str | float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else value


def show_tree(tree: str) -> None:
    """Print a module tree."""
    show_text("")
    for line in tree.splitlines():
        show_text(line)


def show_score(score: Line | None) -> None:
    """Print the event `forecast_scored`; nothing without one."""
    if score is None:
        return
    speed, memory = dict[str, Any](_items(score["tokens_per_second"])), dict[str, Any](_items(score["device_bytes"]))
    place = "inside" if score["inside"] else "outside"
    show_text("")
    show_facts(
        {
            "GPU": score["device"],
            "tokens per second": f"{speed['measured']:,.0f}, {place} the forecast of {speed['least']:,.0f} to "
            f"{speed['most']:,.0f}",
            "peak memory of a GPU": f"{memory['measured'] / 2**30:.1f} GiB, planned "
            f"{memory['planned'] / 2**30:.1f} GiB",
        }
    )


def _items(mapping: Any) -> Iterable[tuple[str, Any]]:
    return dict[str, Any](mapping).items()


def _pairs(mapping: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in _items(mapping))


def _ranks(ranks: list[int]) -> str:
    whole = len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]}-{ranks[-1]}" if whole else f"rank {', '.join(map(str, ranks))}"
