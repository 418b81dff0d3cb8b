"""The names that entries of state dicts get in a model's folder. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from train_loop.errors import UserError
from train_loop.model.weight_map import some
from train_loop.weights.entries import Entry

_MODELS = ("state_dict", "model", "model_state_dict", "module", "net")
"""Keys under which training programs save a model's state dict with other things."""
_BESIDE = frozenset(
    {
        *("optimizer", "optimizers", "optim", "optimizer_state_dict", "optimizer_states", "optimizer_state"),
        *("scheduler", "schedulers", "lr_scheduler", "lr_schedulers", "scheduler_state_dict", "scaler", "grad_scaler"),
        *("ema", "ema_state_dict", "model_ema", "rng", "rng_state", "rng_states", "random_states", "callbacks"),
        *("loops", "train_state", "progress", "hyper_parameters", "config", "args", "epoch", "step", "global_step"),
    }
)
"""Keys of what belongs to training, and not to the model."""
_WRAPPERS = ("module.", "_orig_mod.", "_forward_module.")
"""Beginnings of the names in models that DDP, torch.compile or DeepSpeed has wrapped."""
_INNER = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts of the names in models whose layers torch.compile, recomputation or FSDP1 has wrapped one by one."""


class Chosen(NamedTuple):
    """The tensors of a model among all entries."""

    names: dict[tuple[str, ...], str]
    """Name in the model's folder of each entry, in the order of the file."""
    notes: list[str]
    """Names that were left out or renamed."""


def choose(entries: Sequence[Entry], entry: str | None = None) -> Chosen:
    """Return the tensors of a model and their names; `entry` names the key that holds it, if several may.

    Raises UserError for anything but tensors in it, for names that two tensors would get, and for tensors elsewhere
    that may belong to it.
    """
    notes = list[str]()
    place = _place(entries, entry, notes)
    mine = [one for one in entries if one.path[: len(place)] == place]
    others = [f"{_shown(one.path[len(place) :])} ({one.what})" for one in mine if one.kind is None]
    if others:
        raise UserError(
            f"only tensors can be converted, and the state dict also holds {some(others)}; remove them, and save it "
            "again"
        )
    if not mine:
        raise UserError("it holds no tensors; give the file of a model's state dict")
    names = _unwrapped({one.path: ".".join(one.path[len(place) :]) for one in mine}, notes)
    _check(names)
    _note_shared(mine, names, notes)
    return Chosen(names, notes)


def _place(entries: Sequence[Entry], entry: str | None, notes: list[str]) -> tuple[str, ...]:
    """Return the keys that lead to the model's state dict."""
    place: tuple[str, ...] = ()
    while True:
        depth = len(place)
        below = [one for one in entries if one.path[:depth] == place]
        held = dict.fromkeys(one.path[depth] for one in below if len(one.path) > depth + 1)
        found = [entry] if entry is not None and not depth else [key for key in _MODELS if key in held]
        if not found:
            return place
        if len(found) > 1:
            raise UserError(f"it holds several state dicts: {', '.join(found)}; choose one with --entry")
        if found[0] not in held:
            raise UserError(f"entry {found[0]} not found; it has {some(list(held)) or 'no dicts of tensors'}")
        _leave_out(below, depth, found[0], notes, chosen=entry is not None and not depth)
        place = (*place, found[0])


def _leave_out(below: Iterable[Entry], depth: int, key: str, notes: list[str], *, chosen: bool) -> None:
    """Note the other entries of a file with a state dict. Raises UserError if they may be a part of the model."""
    others = [one for one in below if one.path[depth] != key]
    unknown = dict.fromkeys(one.path[depth] for one in others if one.kind is not None and not _known(one.path[depth]))
    if unknown and not chosen:
        raise UserError(
            f"next to {key}, it holds tensors in {some(list(unknown))}; choose what to convert with --entry, such as "
            f"--entry {key}"
        )
    left = list(dict.fromkeys(one.path[depth] for one in others))
    notes.append(f"took {key}" + (f", and left out {some(left)}" if left else ""))


def _known(key: str) -> bool:
    return key.partition("/")[0] in _BESIDE


def _unwrapped(names: dict[tuple[str, ...], str], notes: list[str]) -> dict[tuple[str, ...], str]:
    """Return names without the beginnings that wrappers of a model have added to all of them."""
    while True:
        prefix = next((one for one in _WRAPPERS if all(name.startswith(one) for name in names.values())), None)
        if prefix is None:
            return _without_inner(names, notes)
        names = {path: name.removeprefix(prefix) for path, name in names.items()}
        notes.append(f"removed {prefix} from the beginning of all {len(names)} names")


def _without_inner(names: dict[tuple[str, ...], str], notes: list[str]) -> dict[tuple[str, ...], str]:
    """Return names without the parts that wrappers of layers have added to some of them."""
    wrapped = {path: found for path, name in names.items() if (found := _INNER.intersection(name.split(".")))}
    if not wrapped:
        return names
    notes.append(f"removed {', '.join(sorted(set().union(*wrapped.values())))} from {len(wrapped)} names")
    plain = {path: ".".join(one for one in names[path].split(".") if one not in _INNER) for path in wrapped}
    return names | plain


def _check(names: dict[tuple[str, ...], str]) -> None:
    seen = set[str]()
    for name in names.values():
        if name in ("", "__metadata__"):
            raise UserError(f"{name!r} is not a name for a tensor in safetensors; rename it")
        if name in seen:
            raise UserError(f"two tensors would have the name {name}; rename one of them")
        seen.add(name)


def _note_shared(mine: Iterable[Entry], names: dict[tuple[str, ...], str], notes: list[str]) -> None:
    first, twins = dict[object, str](), list[str]()
    for one in mine:
        if one.memory is not None and (other := first.setdefault(one.memory, names[one.path])) != names[one.path]:
            twins.append(f"{names[one.path]} and {other}")
    if twins:
        notes.append(f"wrote shared tensors under each name: {some(twins)}")


def _shown(path: Iterable[str]) -> str:
    return ".".join(path) or "the file itself"
