"""Balance of experts by biases, which are no parameters: counts of tokens move them, not gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class ExpertBalance:
    """Biases that routers add to their scores only to choose experts, moved towards equal loads.

    Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024).
    """

    rate: float
    """Size of a move."""
    biases: Mapping[int, tuple[nn.Module, str]]
    """Module and name of the bias [E] of layers, by their places among the layers with experts."""
    take_loads: Callable[[], Tensor]
    """Return the tokens of each expert [L, E] on all ranks since the last call. A collective call."""

    def end_step(self, *, applied: bool) -> None:
        """Raise the biases of experts with less than the mean load of a step, and lower those with more.

        A skipped step changes nothing. A collective call, whose result is identical on all ranks: counts are integers.
        """
        loads = self.take_loads()
        if not applied:
            return
        directions = (loads.sum(1, keepdim=True) - loads * loads.shape[1]).sign()
        for layer, (module, name) in self.biases.items():
            bias = module.get_buffer(name)
            bias.add_(directions[layer].view_as(bias), alpha=self.rate)
