"""The answer of a process that has run users' code, which may have written it: nothing is believed without a check."""

import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from train_loop.plan import ModelShape, SampleCount
from train_loop.preflight.process.child import Ended
from train_loop.spec import Problem, show

_LONGEST, _MOST_VALUES, _LARGEST = 2**17, 200_000, 2**53
"""Maximum characters of a text, number of all values, and value of a number."""
_MOST_PROBLEMS, _LONGEST_MESSAGE = 100, 4000
_POINTER = re.compile(r"(/[\w.-]{1,100}){1,9}")
_OF_DECODERS = (
    *("model_type", "vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "tied", "qkv_bias"),
    *("output_bias", "mlp_bias", "qk_norm", "known", "quantized"),
)
"""Sizes that a model of own code does not have."""


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
            return f"failed with {show(failed[:_LONGEST_MESSAGE], lines=False)}; correct the code"
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
            return show(value)
        if isinstance(value, int | float) and not 0 <= value <= _LARGEST:
            raise ValueError(f"has a number that is not between 0 and {_LARGEST}")
        if isinstance(value, dict):
            return {str(bound(key)): bound(inner) for key, inner in value.items()}
        return [bound(inner) for inner in value] if isinstance(value, list) else value

    return bound(content)


def _valid(answer: _CodeAnswer) -> _CodeAnswer:
    if len(answer.problems) > _MOST_PROBLEMS or any(not _POINTER.fullmatch(one.pointer) for one in answer.problems):
        raise ValueError("has problems of unknown fields")
    if (shape := answer.shape) is not None:
        expected = ModelShape.of_code()
        if any(getattr(shape, name) != getattr(expected, name) for name in _OF_DECODERS):
            raise ValueError("has sizes of a decoder")
        rows = [rows[0] for rows in shape.counts.rows] if shape.counts else []
        if not all([*rows, shape.call.rows if shape.call else 1]):
            raise ValueError("has tensors or calls without rows")
    problems = (replace(one, message=show(one.message[:_LONGEST_MESSAGE], lines=False)) for one in answer.problems)
    return replace(answer, problems=tuple(problems))
