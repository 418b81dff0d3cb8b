"""The schedule reduce_lr_on_plateau: torch's, whose learning rate only evaluations lower."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau


class Plateau:
    """A schedule that lowers the learning rate when the loss of evaluations has stopped to fall.

    It decides by numbers that are the same on all ranks. Its state includes the learning rates, so that a resumed run
    has the same ones.
    """

    def __init__(self, optimizer: Optimizer, **options: Any) -> None:
        self.optimizer = optimizer
        self.last_epoch = 0
        """Optimizer steps, as in other schedules."""
        self._rule = ReduceLROnPlateau(optimizer, **options)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))

    def step(self) -> None:
        """Count an optimizer step."""
        self.last_epoch += 1

    def evaluated(self, loss: float) -> None:
        """Take the loss of an evaluation."""
        self._rule.step(loss)

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group."""
        return self._rule.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self._rule.state_dict() | {"last_epoch": self.last_epoch}

    @property
    def learned(self) -> dict[str, Any]:
        """Return the part of the state that evaluations have set; the rest are options."""
        state = self.state_dict()
        return {name: state[name] for name in ("best", "num_bad_epochs", "cooldown_counter", "_last_lr", "last_epoch")}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Load the state, and set the learning rates."""
        self.last_epoch = values["last_epoch"]
        self._rule.load_state_dict(values)
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = group["lr"].fill_(float(rate)) if isinstance(group["lr"], Tensor) else float(rate)
