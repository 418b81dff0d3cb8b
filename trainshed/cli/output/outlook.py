"""Text output of a plan on a GPU: memory by term, throughput, and suggestions."""

from service.api.schemas import OutlookOut, PlanOut, RangeOut, SuggestionOut
from trainshed.cli.output.printing import show_facts, show_table, show_text

_VERDICTS = {
    "fits": "fits",
    "tight": "tight: the estimate leaves no margin",
    "does_not_fit": "does not fit",
}


def show_outlook(plan: PlanOut, outlook: OutlookOut) -> None:
    """Print memory and throughput of a plan on a GPU."""
    device, terms = outlook.device, [term for term in plan.memory.terms if term.place == "device" and term.bytes]
    show_text("")
    show_facts(
        {
            "GPU": f"{device.title}, {device.memory_bytes / 2**30:.0f} GiB",
            "memory of a worker": f"{outlook.needed_bytes / 2**30:.1f} GiB, {_VERDICTS[outlook.verdict]}",
            "tokens per second": _span(outlook.tokens_per_second) or outlook.no_throughput,
            "seconds per step": None if outlook.step_seconds is None else _seconds(outlook.step_seconds),
            "largest micro-batch": outlook.largest_micro_batch,
        }
    )
    show_text("")
    rest = outlook.needed_bytes - sum(term.bytes for term in terms)
    sizes = [(term.bytes, term.name, term.formula) for term in terms]
    sizes.append((rest, "cuda", "CUDA, its libraries and NCCL"))
    rows = (
        (name, f"{size / 2**30:.2f}", f"{size / device.memory_bytes:.0%}", formula)
        for size, name, formula in sorted(sizes, reverse=True)
    )
    show_table(("memory", "GiB", "of the GPU", "formula"), rows)
    if outlook.parts:
        show_text("")
        show_table(("work of a step", "seconds"), [(one.name, _seconds(one.seconds)) for one in outlook.parts])
    for assumption in outlook.assumptions:
        show_text(f"assumed: {assumption}")
    if outlook.suggestions is not None:
        _show_suggestions(outlook)


def _show_suggestions(outlook: OutlookOut) -> None:
    if outlook.verdict == "fits":
        show_text("it fits; no change is needed")
        return
    if not outlook.suggestions:
        show_text("no three changes together make it fit; choose a smaller model or a GPU with more memory")
        return
    show_text("")
    show_table(("GiB", "tokens/s", "what makes it fit, cheapest first"), map(_suggestion, outlook.suggestions))


def _suggestion(found: SuggestionOut) -> tuple[str, str, str]:
    other = " (other results)" if found.changes_results else ""
    return f"{found.needed_bytes / 2**30:.1f}", _span(found.tokens_per_second) or "unknown", f"{found.change}{other}"


def _span(found: RangeOut | None) -> str | None:
    return None if found is None else f"{found.least:,.0f} to {found.most:,.0f}"


def _seconds(found: RangeOut) -> str:
    return f"{found.least:.3g} to {found.most:.3g}"
