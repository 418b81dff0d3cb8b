"""The answer of a process that has run users' code, which may have written it: nothing is believed without a check."""

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from train_loop.plan import ModelShape, SampleCount
from train_loop.preflight.child import Ended
from train_loop.spec import Problem, show

_LONGEST, _MOST_VALUES, _LARGEST = 4000, 200_000, 2**53
"""Maximum characters of a text, number of all values, and value of a number."""
_MOST_PROBLEMS = 100
_POINTER = re.compile(r"(/[\w.-]{1,100}){1,9}")
_FREE = {"adapters", "built", "call", "counts", "float8", "kept", "labels", "pools", "tiles", "whole_scores"}
"""Sizes of a model of own code. All others are those of a decoder, which it is not."""


@dataclass(frozen=True)
class _CodeAnswer:
    problems: tuple[Problem, ...]
    shape: ModelShape | None
    count: SampleCount | None


_ANSWERS = TypeAdapter(_CodeAnswer)


def answer_with_code(before: dict[str, Any], ended: Ended) -> dict[str, Any]:
    """Return the answer to a spec with own code.

    `before` is the part that a process without users' code has found: problems, notes, settings of adapters, and the
    SHA-256 of the package. The process that ran the code adds problems and sizes, or a problem of its own.
    """
    found = _reason(ended)
    if isinstance(found, str):
        pointer = ended.subject if _POINTER.fullmatch(ended.subject) else "/code"
        found = _CodeAnswer((Problem(pointer, f"its check {found}"),), None, None)
    problems = [*before["problems"], *map(asdict, found.problems)]
    return before | {
        "problems": problems,
        "shape": found.shape and asdict(found.shape),
        "count": None if problems else found.count and asdict(found.count),
    }


def _reason(ended: Ended) -> _CodeAnswer | str:
    """Return the answer of an ended process, or why it has none."""
    if ended.limit is not None:
        return ended.limit if ";" in ended.limit else f"{ended.limit}; correct the code"
    if not ended.found:
        return f"was ended by the code ({ended.ending}); correct the code"
    try:
        content = json.loads(ended.found)
        if isinstance(content, dict) and isinstance(failed := content.get("failed"), str):
            return f"failed with {show(failed[:_LONGEST], lines=False)}; correct the code"
        if isinstance(content, dict) and "unavailable" in content:
            return "found that storage does not answer; submit the job again, or correct the code"
        return _valid(_ANSWERS.validate_python(_bounded(content)))
    except (ValueError, RecursionError) as error:
        reason = "is no JSON of the expected form" if isinstance(error, ValidationError) else str(error)
        return f"has no valid answer: it {reason}; correct the code"


def _bounded(content: object) -> object:
    """Return JSON with printable texts. Raises ValueError for more or larger values than a check answers."""
    values = 0

    def bound(value: object) -> object:
        nonlocal values
        values += 1
        if values > _MOST_VALUES:
            raise ValueError(f"has more than {_MOST_VALUES} values")
        if isinstance(value, str):
            if len(value) > _LONGEST:
                raise ValueError(f"has a text of more than {_LONGEST} characters")
            return show(value, lines=False)
        if isinstance(value, int | float) and not 0 <= value <= _LARGEST:
            raise ValueError(f"has a number that is not between 0 and {_LARGEST}")
        if isinstance(value, dict):
            return {str(bound(key)): bound(inner) for key, inner in value.items()}
        return [bound(inner) for inner in value] if isinstance(value, list) else value

    return bound(content)


def _valid(answer: _CodeAnswer) -> _CodeAnswer:
    if len(answer.problems) > _MOST_PROBLEMS or any(not _POINTER.fullmatch(one.pointer) for one in answer.problems):
        raise ValueError("has problems of unknown fields")
    if answer.shape is not None:
        free = {one.name: getattr(answer.shape, one.name) for one in fields(ModelShape) if one.name in _FREE}
        if answer.shape != replace(ModelShape.of_code(), **free):
            raise ValueError("has sizes of a decoder")
    return answer
