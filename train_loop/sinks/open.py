"""Sinks by their names."""

from train_loop.errors import UserError
from train_loop.run_dir import RunDir, SinkName
from train_loop.sinks.sink import Sink
from train_loop.sinks.tensorboard import TensorBoard


def open_sink(name: SinkName, run_dir: RunDir) -> Sink:
    """The sink of a run. Raises UserError where its package is missing, and whatever fails in it."""
    if name != "tensorboard":
        raise UserError(f"the sink {name} is not supported yet; choose tensorboard")
    return TensorBoard(run_dir.tensorboard)
