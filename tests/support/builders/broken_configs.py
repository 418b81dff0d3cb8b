"""Small configs with a random mistake in one field."""

import random
from typing import Any

from tests.support.families.families import FAMILIES, small

_WRONG: tuple[Any, ...] = (
    None,
    0,
    1,
    3,
    7,
    -1,
    10**6,
    0.5,
    "",
    "gleu",
    True,
    [],
    [1],
    ["full_attention"],
    {},
    {"a": 1},
)
_ROPES: tuple[Any, ...] = (
    {"rope_type": "yarnn", "rope_theta": 1e4},
    {"rope_type": "yarn", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": "two"},
    {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0]},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 0},
    {"rope_theta": 0},
    {"full_attention": {"rope_type": "default"}},
)


def broken(draw: random.Random) -> dict[str, Any]:
    """Return a config of any family in which a field is missing, or has a value that seldom fits."""
    config = small(draw.choice(FAMILIES))
    field = draw.choice(sorted(config.keys() - {"model_type"}) or ["hidden_size"])
    if draw.random() < 0.15:
        return {name: value for name, value in config.items() if name != field}
    return config | {field: draw.choice(_ROPES if field.startswith("rope") else _WRONG)}
