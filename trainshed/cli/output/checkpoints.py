"""Text output of checkpoints."""

from service.api.schemas import Checkpoints
from trainshed.cli.output.printing import show_table


def show_checkpoints(checkpoints: Checkpoints) -> None:
    """Print checkpoints, one per row."""
    rows = (
        (
            str(c.step),
            f"{c.tokens:,}",
            f"{c.bytes / 2**20:,.1f} MiB",
            str(c.attempt),
            f"{c.time:%F %T}",
            "pinned" if c.pinned else "",
            " ".join(f"{name}={value:.4g}" for name, value in c.metrics.items()),
        )
        for c in checkpoints.data
    )
    show_table(("step", "tokens", "size", "attempt", "time", "", "metrics"), rows)
