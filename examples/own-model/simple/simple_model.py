"""Two linear layers and cross entropy, as own code of a job."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SimpleModel(nn.Module):
    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.layer1 = nn.Linear(inputs, width)
        self.relu = nn.ReLU()
        self.layer2 = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(self.relu(self.layer1(x)))


def build(config: dict[str, int]) -> nn.Module:
    """Return the model. It is built without memory: its weights come from reset_parameters of each layer."""
    return SimpleModel(**config)


def batch(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch from some rows of data.columns.own: here they are the batch."""
    return {"x": columns["features"], "label": columns["label"].long()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Return a sum, its count, and the sums of code.sums. Trainshed divides by the count of the whole step."""
    logits = model(batch["x"])
    total = F.cross_entropy(logits.float(), batch["label"], reduction="sum")
    return total, len(batch["label"]), {"accuracy": (logits.argmax(-1) == batch["label"]).sum()}


def rows(count: int, inputs: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return features and labels that can be learnt, for a first try."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, inputs, generator=generator)
    return features, (features @ torch.randn(inputs, classes, generator=generator)).argmax(-1)
