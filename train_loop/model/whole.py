"""Parameters that each rank holds whole: `strategy.ignored_params`."""

from collections.abc import Sequence

from torch import nn

from train_loop.model.match import match_parameters


def whole_parameters(model: nn.Module, patterns: Sequence[str]) -> set[int]:
    """Return the ids of the parameters that patterns match. Raises ModelError for a pattern that matches nothing."""
    return {one for pattern in patterns for one in match_parameters(model, pattern, setting="ignored_params")}
