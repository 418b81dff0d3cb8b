"""The work that the ranks of a job do, by the kind of its spec."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from train_loop.data.dataset import Dataset
from train_loop.infer import infer
from train_loop.loop.session import Session
from train_loop.run_dir import Outcome
from train_loop.train import train


class Work(NamedTuple):
    """The work of a rank."""

    run: Callable[[Any, Session, Dataset, Dataset | None], Outcome]
    """Function that takes the spec, the session, the prepared rows, and those of evaluation."""
    end_event: str
    """Event that reports its end."""


WORK: Mapping[str, Work] = MappingProxyType(
    {"train": Work(train, "training_ended"), "infer": Work(infer, "work_ended")}
)
