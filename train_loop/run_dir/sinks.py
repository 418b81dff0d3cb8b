"""Metric sinks: their names, their selection, and their positions in a run's metrics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from train_loop.run_dir.files.durable import write_durably
from train_loop.run_dir.formats import Format
from train_loop.run_dir.remote import read_whole

SinkName = Literal["tensorboard", "mlflow", "wandb"]
SINKS: tuple[SinkName, ...] = get_args(SinkName)
SINKS_VARIABLE = "TRAINSHED_SINKS"
"""Environment variable with the sinks; the operator sets it for the service, the service for drivers."""
DEFAULT_SINKS: tuple[SinkName, ...] = ("tensorboard",)
_NONE = "none"


class SinkPlace(Format):
    """sinks/<name>.json: the position before which all metrics were sent and are safe in the sink."""

    attempt: int = 0
    offset: int = 0
    """Offset in bytes in the attempt's metrics."""
    epoch: int = 0
    """Newest worker group of the attempt before this position; later lines of older groups are superseded."""


def parse_sinks(text: str) -> tuple[SinkName, ...]:
    """Parse a comma-separated list of sinks; `none` means no sinks. Raises ValueError for unknown names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == [_NONE]:
        return ()
    unknown = [name for name in names if name not in SINKS]
    if unknown or not names:
        raise ValueError(
            f"sinks={text!r} names {', '.join(unknown) or 'nothing'}; expected any of {', '.join(SINKS)}, or {_NONE}"
        )
    return tuple(sink for sink in SINKS if sink in names)


def format_sinks(sinks: Sequence[SinkName]) -> str:
    """Return sinks as a comma-separated list that `parse_sinks` accepts."""
    return ",".join(sinks) or _NONE


def read_place(path: Path) -> SinkPlace:
    """Return a sink's position; the beginning if it is missing or damaged. Raises any storage error."""
    try:
        return SinkPlace.model_validate_json(read_whole(path, below=path.parent.parent))
    except (FileNotFoundError, ValueError):
        # Metrics that are sent twice do no harm.
        return SinkPlace()


def write_place(path: Path, place: SinkPlace) -> None:
    """Write a sink's position durably."""
    write_durably(path, place.model_dump_json(), below=path.parent.parent)
