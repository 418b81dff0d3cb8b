"""Which sinks there are, how they are chosen, and how far each has been given a run's metrics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from train_loop.run_dir.durable import write_durably
from train_loop.run_dir.formats import Format
from train_loop.run_dir.remote import read_whole

SinkName = Literal["tensorboard", "mlflow", "wandb"]
SINKS: tuple[SinkName, ...] = get_args(SinkName)
SINKS_VARIABLE = "TRAINSHED_SINKS"
"""By which the service tells a driver, and an operator the service."""
DEFAULT_SINKS: tuple[SinkName, ...] = ("tensorboard",)
_NONE = "none"


class SinkPlace(Format):
    """sinks/<name>.json: all metrics before this place have been handed over, and are safe in the sink."""

    attempt: int = 0
    offset: int = 0
    """Bytes of the attempt's metrics."""
    epoch: int = 0
    """The newest worker group of the attempt before this place; later lines of older ones are superseded."""


def parse_sinks(text: str) -> tuple[SinkName, ...]:
    """The sinks of a comma list, each once; `none` is no sink. Raises ValueError for names that are unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == [_NONE]:
        return ()
    unknown = [name for name in names if name not in SINKS]
    if unknown or not names:
        raise ValueError(
            f"sinks={text!r} names {', '.join(unknown) or 'nothing'}; choose of {', '.join(SINKS)}, or {_NONE}"
        )
    return tuple(sink for sink in SINKS if sink in names)


def format_sinks(sinks: Sequence[SinkName]) -> str:
    """The comma list that `parse_sinks` reads as these."""
    return ",".join(sinks) or _NONE


def read_place(path: Path) -> SinkPlace:
    """How far a sink is; at the beginning where nothing is known. Raises what storage raises."""
    try:
        return SinkPlace.model_validate_json(read_whole(path))
    except (FileNotFoundError, ValueError):
        # What is handed over twice does no harm.
        return SinkPlace()


def write_place(path: Path, place: SinkPlace) -> None:
    """Say, durably, how far a sink is."""
    write_durably(path, place.model_dump_json())
