"""A family of plain modules: the model has two branches that share a weight, and reads no tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from train_loop.model.build import DTYPES
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.family import Family
from train_loop.spec import ModelSpec


class Branches(nn.Module):
    """The difference of two branches [n, 4], scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.right.weight = self.left.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return [n, 4]."""
        out: Tensor = self.scale * (self.left(left) - self.right(right))
        return out


class Plain(Family):
    """The family of such modules."""

    source = "mymodel 1.0"

    def build(self, spec: ModelSpec) -> Anatomy:
        with torch.device("meta"):
            model = Branches()
        return self.anatomy(model.to(DTYPES[spec.master_dtype]))

    def anatomy(self, model: nn.Module) -> Anatomy:
        layers = tuple(one for one in model.modules() if isinstance(one, nn.Linear))
        return Anatomy(model, self, layers, embeddings=None, head=None, norms=(), depth=0, attention_width=0)

    def initialise(self, model: nn.Module, name: str) -> None:
        module: Any = model.get_submodule(name)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def call(self, model: nn.Module, columns: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Tensor:
        out: Tensor = model(columns["left"], columns["right"], **arguments)
        return out
