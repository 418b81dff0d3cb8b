"""Opening of sinks by name."""

from train_loop.run_dir import RunDir, SinkName
from train_loop.sinks.describe import Description
from train_loop.sinks.mlflow import MLflow
from train_loop.sinks.sink import Sink
from train_loop.sinks.tensorboard import TensorBoard
from train_loop.sinks.wandb import WandB


def open_sink(name: SinkName, run_dir: RunDir) -> Sink:
    """Open a sink for a run. Raises UserError if its package is missing, and the sink's own errors."""
    match name:
        case "tensorboard":
            return TensorBoard(run_dir.tensorboard)
        case "mlflow":
            return MLflow(Description.of(run_dir))
        case "wandb":
            return WandB(Description.of(run_dir), run_dir.sink_file(name).parent)
