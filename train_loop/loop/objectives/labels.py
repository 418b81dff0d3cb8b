"""Objectives of heads of labels: cross entropy of classes, per row or token, and squared errors of numbers."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from train_loop.data.dataset import IGNORE
from train_loop.data.order import PADDING
from train_loop.loop.batch import MicroBatch, StepBatch
from train_loop.loop.objectives.objective import Terms, call_model
from train_loop.model.families.anatomy import Anatomy

Batch = MicroBatch | StepBatch


class ClassLoss:
    """Cross entropy of classes, summed over rows, or over tokens with a label.

    Evaluations count each class, so that accuracy and macro F1 are those of all samples.
    """

    sums = ()

    def __init__(self, anatomy: Anatomy, *, pools: bool, label_smoothing: float = 0.0) -> None:
        assert anatomy.labels is not None
        self.anatomy, self._classes, self._pools, self._smoothing = anatomy, anatomy.labels, pools, label_smoothing
        self.columns = ("input_ids", "position_ids", "targets" if pools else "labels")
        counts = [f"{kind}_{one}" for kind in ("correct", "predicted", "present") for one in range(anatomy.labels)]
        self.evaluation_sums = ("loss", *counts)

    def divisor(self, batch: StepBatch) -> Tensor:
        """Return the number of labels."""
        return (self._labels(batch) != IGNORE).sum()

    def __call__(self, batch: MicroBatch) -> Terms:
        """Return the summed cross entropy. Raises ModelError for errors in the model's own code."""
        return Terms(self._sum(call_model(self.anatomy, batch), batch, self._smoothing))

    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return the summed cross entropy, and the correct, predicted and present labels of each class."""
        logits, labels = call_model(self.anatomy, batch), self._labels(batch).flatten()
        labelled = labels != IGNORE
        found, true = logits.flatten(0, -2).argmax(-1)[labelled], labels[labelled]
        counts = [torch.bincount(one, minlength=self._classes) for one in (true[found == true], found, true)]
        return self._sum(logits, batch, 0.0), *torch.cat(counts).unbind()

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float | int]:
        """Return mean cross entropy, accuracy, macro F1 over the classes that occur, and the number of labels."""
        loss, *counts = sums.values()
        correct, predicted, present = torch.stack(counts).view(3, self._classes)
        occurs = predicted + present > 0
        f1 = (2 * correct[occurs] / (predicted + present)[occurs]).mean()
        count = present.sum()
        rates = {"loss": loss / count, "accuracy": correct.sum() / count, "f1": f1}
        return {name: value.item() for name, value in rates.items()} | {"labels": int(count)}

    def _sum(self, logits: Tensor, batch: MicroBatch, smoothing: float) -> Tensor:
        rows, labels = logits.float().flatten(0, -2), self._labels(batch).flatten()
        return F.cross_entropy(rows, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)

    def _labels(self, batch: Batch) -> Tensor:
        """Return the class of each row or token; IGNORE without one."""
        if not self._pools:
            return batch.labels
        return batch.targets.long().masked_fill(batch.samples == PADDING, IGNORE)


class NumberLoss:
    """Squared errors of the number of each row."""

    columns = ("input_ids", "position_ids", "targets")
    sums = ()
    evaluation_sums = ("loss", "rows")

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy

    def divisor(self, batch: StepBatch) -> Tensor:
        """Return the number of rows."""
        return (batch.samples != PADDING).sum()

    def __call__(self, batch: MicroBatch) -> Terms:
        """Return the summed squared errors. Raises ModelError for errors in the model's own code."""
        errors = call_model(self.anatomy, batch).float().squeeze(-1) - batch.targets
        return Terms(errors.masked_fill(batch.samples == PADDING, 0.0).square().sum())

    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the summed squared errors, and the number of rows."""
        return self(batch).total, (batch.samples != PADDING).sum()

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float | int]:
        """Return the mean squared error, as loss and as mse, and the number of labels."""
        mean = (sums["loss"] / sums["rows"]).item()
        return {"loss": mean, "mse": mean, "labels": int(sums["rows"])}
