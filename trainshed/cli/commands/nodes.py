"""`trainshed nodes`: hosts of the cluster."""

from collections.abc import Iterable

from service.api.schemas import NodeOut
from trainshed.cli.connect import connect
from trainshed.cli.ids import shorten
from trainshed.cli.options import AsJson
from trainshed.cli.output.printing import show_json, show_next, show_table

_GIB = 2**30


def nodes(as_json: AsJson = False) -> None:
    """List hosts with their state, free capacity, jobs and last failure."""
    with connect() as api:
        answer = api.nodes()
    if as_json:
        show_json(answer)
        return
    show_nodes(answer.data)
    show_next("ps --state RUNNING")


def show_nodes(found: Iterable[NodeOut]) -> None:
    """Print one node per row."""
    rows = (
        (
            node.host + (" (head)" if node.is_head else ""),
            node.address,
            node.state,
            f"{node.since:%F %T}",
            _capacity(node),
            " ".join(shorten(node.jobs)) if node.jobs else "",
            f"{node.last_failure.time:%F %T} {node.last_failure.message}" if node.last_failure else "",
        )
        for node in found
    )
    show_table(("host", "address", "state", "since", "free/total", "jobs", "last failure"), rows)


def _capacity(node: NodeOut) -> str:
    """Format capacity: `1.5/2 CPU 21.3/22.9 GiB`."""
    parts = list[str]()
    for name, total in sorted(node.total.items()):
        free = None if node.free is None else node.free.get(name, 0.0)
        scale, unit = (_GIB, "GiB") if name == "memory" else (1, name)
        left = "-" if free is None else f"{free / scale:.4g}"
        parts.append(f"{left}/{total / scale:.4g} {unit}")
    return " ".join(parts)
