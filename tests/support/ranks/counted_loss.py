"""An objective as in users' own code: its loss returns a sum and a count."""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from train_loop.data.dataset import IGNORE
from train_loop.loop.batch import MicroBatch, StepBatch
from train_loop.loop.objectives.objective import Terms, call_model
from train_loop.model.families.anatomy import Anatomy


class CountedLoss:
    """Token cross entropy with its accuracy in each metrics line, and only the accuracy in evaluations."""

    columns: tuple[str, ...] = ("input_ids", "position_ids", "labels")
    sums: tuple[str, ...] = ("accuracy",)
    evaluation_sums: tuple[str, ...] = ("correct", "labels")

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy

    def divisor(self, batch: StepBatch) -> Tensor | None:
        """Return None: the terms contain the count."""
        return None

    def __call__(self, batch: MicroBatch) -> Terms:
        """Return the summed loss, the number of labels, and the number of tokens that are predicted correctly."""
        logits = self._logits(batch)
        total = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum")
        return Terms(total, _labels(batch), {"accuracy": _correct(logits, batch)})

    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return the number of tokens that are predicted correctly, and that of labels."""
        return _correct(self._logits(batch), batch), _labels(batch)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float | int]:
        """Return the accuracy, as `eval_accuracy`, and the number of labels, as `eval_labels`."""
        return {"accuracy": (sums["correct"] / sums["labels"]).item(), "labels": int(sums["labels"])}

    def _logits(self, batch: MicroBatch) -> Tensor:
        return call_model(self.anatomy, batch).float()


def _labels(batch: MicroBatch) -> Tensor:
    return (batch.labels != IGNORE).sum()


def _correct(logits: Tensor, batch: MicroBatch) -> Tensor:
    return (logits.argmax(-1) == batch.labels).sum()
