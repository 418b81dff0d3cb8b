"""Checks of code that runs only in training, or only in evaluation: calls of a small copy do not show it."""

from torch import nn

from train_loop.errors import ModelError
from train_loop.model.families.causal.build import config_of

_RATES = ("decoder_layerdrop", "layerdrop")
"""Fields with the probability of skipping a layer, the preferred one first."""


def check_modes(model: nn.Module) -> None:
    """Raise ModelError for a model whose ranks would wait for each other, or whose evaluation changes its weights."""
    config, name = config_of(model), type(model).__name__
    rate = max((getattr(module, "layerdrop", 0) for module in model.modules()), default=0)
    if rate:
        field = next(field for field in _RATES if hasattr(config, field))
        raise ModelError(
            f"{name} skips a layer with probability {rate} in training, and each rank skips others, so that ranks "
            f"would wait for each other; set {field}: 0.0 in the model's config"
        )
    if getattr(config, "rescale_every", 0):
        raise ModelError(
            f"{name} divides its weights before an evaluation (rescale_every={config.rescale_every}), so that a "
            "checkpoint after it would have others; set rescale_every: 0 in the model's config"
        )
