"""The union of the specs of all kinds of jobs, which the service stores and the driver reads.

`docs/contribute/kinds.md` says how a kind is added.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from train_loop.spec.job import JobSpec
from train_loop.spec.kinds.infer import InferJobSpec
from train_loop.spec.model import LoraSpec

TRAIN = "train"
"""Kind of a spec that names none."""


def kind_of(spec: Any) -> str:
    """Return the kind of a spec, or of plain data."""
    kind = spec.get("kind", TRAIN) if isinstance(spec, Mapping) else getattr(spec, "kind", TRAIN)
    return kind if isinstance(kind, str) else TRAIN


AnyJobSpec = Annotated[
    Annotated[JobSpec, Tag("train")] | Annotated[InferJobSpec, Tag("infer")],
    Discriminator(kind_of),
]
"""The spec of a job of any kind. The service and the driver use only the members that all kinds have."""

KINDS: Mapping[str, type[JobSpec] | type[InferJobSpec]] = MappingProxyType({"train": JobSpec, "infer": InferJobSpec})


def with_lora(spec: AnyJobSpec, lora: LoraSpec | None) -> AnyJobSpec:
    """Return a spec with the settings of the adapters in the folder that it names; None leaves it unchanged."""
    if lora is None:
        return spec
    return spec.model_copy(update={"model": spec.model.model_copy(update={"lora": lora})})
