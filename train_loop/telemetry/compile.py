"""Graphs and graph breaks of torch.compile."""

from dataclasses import dataclass, field

from torch._dynamo.utils import counters


@dataclass
class CompileWatch:
    """Counts of compiled graphs and graph breaks, reported if they have changed."""

    graphs: int = 0
    breaks: dict[str, int] = field(default_factory=dict)

    def news(self) -> dict[str, object]:
        """Return the number of graphs, and each reason for a graph break with its count; empty if nothing has changed.

        The reasons include the limit on recompiling one function.
        """
        graphs = counters["stats"]["unique_graphs"]
        breaks = {**counters["unimplemented"], **counters["graph_break"]}
        if (graphs, breaks) == (self.graphs, self.breaks):
            return {}
        self.graphs, self.breaks = graphs, breaks
        return {"graphs": graphs, "graph_breaks": breaks}
