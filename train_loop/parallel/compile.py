"""torch.compile, layer by layer, and a word on what it did."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._dynamo.utils import counters


def apply_compile(units: Sequence[nn.Module]) -> None:
    """Compile what each unit computes, inside its call, so that FSDP's hooks, also of other units, stay outside."""
    for unit in units:
        unit.forward = torch.compile(unit.forward)


@dataclass
class CompileWatch:
    """Tells of graphs that were compiled since it was last asked, and of what broke them."""

    graphs: int = 0
    breaks: dict[str, int] = field(default_factory=dict)

    def news(self) -> dict[str, object]:
        """Graphs so far, and every reason for which code was left to Python with its count, where that has changed.

        Among the reasons is the limit of compiling one function again and again.
        """
        graphs = counters["stats"]["unique_graphs"]
        breaks = {**counters["unimplemented"], **counters["graph_break"]}
        if (graphs, breaks) == (self.graphs, self.breaks):
            return {}
        self.graphs, self.breaks = graphs, breaks
        return {"graphs": graphs, "graph_breaks": breaks}
