"""A family of plain modules: the model has two branches that share a weight, and reads no tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.builders.specs import TINY
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.family import Examination, Family
from train_loop.plan import ModelShape, read_shape
from train_loop.spec import JobSpec, ModelSpec


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
    """The family of such modules, whose sizes are made up."""

    source = "mymodel 1.0"

    def shape(self, spec: ModelSpec) -> ModelShape:
        return replace(read_shape(TINY), model_type="own", layers=2)

    def build(self, spec: ModelSpec) -> Anatomy:
        with torch.device("meta"):
            return self.anatomy(Branches())

    def anatomy(self, model: nn.Module) -> Anatomy:
        layers = tuple(one for one in model.modules() if isinstance(one, nn.Linear))
        return Anatomy(model, self, layers, embeddings=None, head=None, norms=(), depth=0, attention_width=0)

    def examine(self, anatomy: Anatomy, spec: JobSpec) -> Examination:
        return Examination({}, after_head=None, settings=())

    def initialise(self, model: nn.Module, name: str) -> None:
        module: Any = model.get_submodule(name)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def call(self, model: nn.Module, columns: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Tensor:
        out: Tensor = model(**columns, **arguments)
        return out
