"""torch.compile, layer by layer, and a word on what it did."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._dynamo.utils import counters


def apply_compile(layers: Sequence[nn.Module]) -> None:
    """Compile what each layer computes, inside its call, so that FSDP's hooks stay outside the graphs."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward)


@dataclass
class CompileWatch:
    """Tells of graphs that were compiled since it was last asked, and of what broke them."""

    graphs: int = 0
    breaks: dict[str, int] = field(default_factory=dict)

    def news(self) -> dict[str, object]:
        """Graphs so far and every reason for a graph break with its count, where one of them has changed."""
        graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
        if (graphs, breaks) == (self.graphs, self.breaks):
            return {}
        self.graphs, self.breaks = graphs, breaks
        return {"graphs": graphs, "graph_breaks": breaks}
