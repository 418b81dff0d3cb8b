"""Upper bounds on the numbers in a model's config. Building 20,000 layers takes minutes; a check of bounds does not."""

import re
from collections.abc import Iterator
from typing import Any

from train_loop.plan import ModelShape
from train_loop.spec import Problem, as_pointer

_BOUNDS = (
    (re.compile(r"num_labels"), 10_000),
    (re.compile(r".*layers?|.*depth"), 1_024),
    (re.compile(r".*(heads?|groups?)"), 4_096),
    (re.compile(r".*experts?(_per_tok|_per_token)?|top_k"), 4_096),
    (re.compile(r".*vocab_size"), 1 << 24),
    (re.compile(r".*(hidden|intermediate|embd|inner|ffn|model).*(size|dim)|d_model|d_ff|n_embd|n_inner"), 1 << 20),
)
"""Patterns of field names with their largest allowed number, far above the number of any real model."""
_LARGEST = 1 << 40
"""Largest allowed number of all other integer fields."""

_MOST_PARAMETERS = 1 << 44
"""Largest allowed number of parameters, 17.6 trillion: ten times those of the largest known model."""


def large_model(shape: ModelShape, pointer: str) -> list[Problem]:
    """Return a problem if a model is too large for any cluster. Its modules alone would take minutes to build."""
    if shape.parameters <= _MOST_PARAMETERS:
        return []
    return [
        Problem(
            pointer,
            f"the config describes a model of {shape.parameters:,} parameters; expected at most {_MOST_PARAMETERS:,}; "
            "correct its sizes",
        )
    ]


def large_numbers(config: dict[str, Any], pointer: str) -> list[Problem]:
    """Return a problem for each number of a config above its bound; `pointer` is that of the config."""
    return [
        Problem(
            pointer + as_pointer(steps) if pointer.endswith("config") else pointer,
            f"invalid {steps[-1]}={value}; expected at most {most}; correct it in the model's config",
        )
        for steps, value in _numbers(config)
        if abs(value) > (most := _bound(steps[-1]))
    ]


def _bound(name: str) -> int:
    return next((most for pattern, most in _BOUNDS if pattern.fullmatch(name)), _LARGEST)


def _numbers(config: dict[str, Any]) -> Iterator[tuple[list[str], int | float]]:
    waiting: list[tuple[list[str], Any]] = [([], config)]
    while waiting:
        steps, part = waiting.pop()
        for name, value in part.items():
            if isinstance(value, dict):
                waiting.append(([*steps, str(name)], value))
            elif isinstance(value, int) and not isinstance(value, bool):
                yield [*steps, str(name)], value
