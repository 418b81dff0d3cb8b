"""Optimizer state in a file of `checkpoint.export.full --with optimizer`, next to the model. Pure."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from train_loop.checkpoint.optimizer_state import TrainingState
from train_loop.errors import UserError
from train_loop.weights.entries import Entry

_STATE, _FACTS = "optimizer", "training"


def split_off(entries: Sequence[Entry]) -> tuple[list[Entry], list[Entry], TrainingState | None]:
    """Return the entries of the model, those of its optimizer, and where the run was; None for other files.

    Raises UserError if the file has such a state that is damaged.
    """
    facts = [one for one in entries if one.path[:1] == (_FACTS,)]
    if not any(one.path == (_FACTS, "format") for one in facts):
        return [*entries], [], None
    states = [one for one in entries if one.path[:1] == (_STATE,)]
    strange = [one for one in states if one.kind is None or len(one.path) != len((_STATE, "parameter", "state"))]
    try:
        found = TrainingState.model_validate(_nested(facts))
    except ValidationError as error:
        raise UserError(f"it has an invalid entry {_FACTS}: {error.errors()[0]['msg']}; write it again") from error
    if strange:
        raise UserError(
            f"{'.'.join(strange[0].path)} is {strange[0].what}, and not an optimizer's tensor; write it again"
        )
    return [one for one in entries if one.path[:1] not in ((_FACTS,), (_STATE,))], states, found


def state_names(states: Sequence[Entry]) -> dict[tuple[str, ...], str]:
    """Return the name of each tensor in the folder: its parameter and its state."""
    return {one.path: ".".join(one.path[1:]) for one in states}


def _nested(facts: Sequence[Entry]) -> dict[str, Any]:
    """Return the values of plain entries as they lie in each other."""
    found = dict[str, Any]()
    for one in facts:
        place = found
        for key in one.path[1:-1]:
            place = place.setdefault(key, {})
        place[one.path[-1]] = one.value
    return found
