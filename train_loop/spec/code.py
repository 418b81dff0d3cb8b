"""`code:` a model, a loss and a batch function of the user's own, in a package."""

import os
import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, field_validator

from train_loop.spec.base import SpecModel
from train_loop.spec.checkpoint import CheckpointSpec
from train_loop.spec.data import DataSpec
from train_loop.spec.model import ModelSpec
from train_loop.spec.names.spellings import AUTO
from train_loop.spec.strategy import StrategySpec
from train_loop.spec.training import TrainingSpec

_OF_LANGUAGE_MODELS = {
    ModelSpec: ("path", "config", "tokenizer", "attn_implementation"),
    DataSpec: ("on_bad_rows", "on_long_rows", "sequence_length", "packing"),
    TrainingSpec: ("max_tokens", "chunked_loss", "label_smoothing_factor", "z_loss"),
    StrategySpec: ("apply_tiled_mlp",),
}
"""Fields that need tokens, a tokenizer, or the layers and the head of a language model."""

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_TAKEN = ("loss", "count", "seconds", "samples")
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=40, strict=True)]
_ENTRY_POINT = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}(\.{_NAME})*")


def _is_entry_point(text: str) -> str:
    if _ENTRY_POINT.fullmatch(text) is None:
        raise ValueError(f"{text[:200]!r} does not name a function; write module:function, for example mymodel:build")
    return text


EntryPoint = Annotated[str, AfterValidator(_is_entry_point)]
"""A function of a package, `module:function`."""


class CodeSpec(SpecModel):
    """Own code: a package, and the functions in it that make the model, its batches and its loss."""

    package: str = Field(
        description="URI of a folder, a wheel or a zip file with Python code, below a storage root; a folder with "
        "__init__.py is a package of the folder's name"
    )
    model: EntryPoint = Field(description="module:function; called with config, it returns the torch.nn.Module")
    loss: EntryPoint = Field(
        description="module:function; called with model and batch, it returns the sum of the loss and the count by "
        "which the sums of a step are divided"
    )
    batch: EntryPoint = Field(
        description="module:function; called with the columns of some rows, it returns the batch: a mapping of tensors"
    )
    config: dict[str, Any] = Field(default={}, description="argument of the model's function")
    sums: tuple[Name, ...] = Field(
        default=(),
        max_length=16,
        description="names of further sums that the loss returns in a mapping, such as correct; each is logged divided "
        "by the count",
    )
    sequence: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default={},
        description="entries of the batch that ulysses_size splits over the workers of a sequence, each with the "
        "dimension that is split, such as {tokens: 1}; the model then has a method split_sequence",
    )
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        default=None,
        description="SHA-256 that the package must have; null: that of the submission, which fills in this field",
    )

    @field_validator("sums")
    @classmethod
    def _are_new_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name in _TAKEN or names.count(name) > 1:
                raise ValueError(f"{name} is already the name of a sum or result; choose another")
        return names

    @field_validator("package")
    @classmethod
    def _is_on_storage(cls, uri: str) -> str:
        if uri.startswith("file:") or os.path.isabs(uri):
            return uri
        if "://" in uri:
            raise ValueError(f"{uri} must lie on a file system; choose a file:// URI or a path")
        raise ValueError(
            f"{uri} is a relative path, but service and workers have different folders; write an absolute path"
        )


def check_part(code: CodeSpec, part: SpecModel) -> None:
    """Raise ValueError for a field of a part of a spec that own code does not have."""
    for name in _OF_LANGUAGE_MODELS.get(type(part), ()):
        value = getattr(part, name)
        # Compared with defaults, because the resolved spec that workers read has every field set.
        if value != type(part).model_fields[name].get_default():
            raise ValueError(
                f"{name}={value} is a setting of language models, which own code (code) does not have; remove it"
            )
    if isinstance(part, DataSpec):
        _check_sources(part)
    if isinstance(part, TrainingSpec):
        _check_training(part)
    if isinstance(part, StrategySpec):
        _check_units(part, code)
    if isinstance(part, CheckpointSpec) and part.keep_best is not None:
        known = ("loss", "grad_norm", "eval_loss", *(f"eval_{name}" for name in code.sums))
        if part.keep_best.metric not in known:
            raise ValueError(
                f"keep_best.metric={part.keep_best.metric} is not measured for this code; choose one of "
                f"{', '.join(known)}, or return the sum {part.keep_best.metric.removeprefix('eval_')} (code.sums)"
            )


def _check_sources(data: DataSpec) -> None:
    for source in (*data.sources, *data.eval_sources):
        if source.format not in ("auto", "parquet"):
            raise ValueError(f"format={source.format}, and own code (code) reads Parquet files only; convert them")
        if not data.columns_of(source).own:
            raise ValueError(
                "own code (code) gets the columns that columns.own names, and other roles are those of language "
                "models; write, for example, columns: {own: [image, label]}"
            )


def _check_training(training: TrainingSpec) -> None:
    if training.optimizer == "muon":
        raise ValueError(
            "optimizer=muon needs embeddings and head, which the loop does not find in own code (code); choose adamw"
        )
    if training.per_device_train_batch_size == AUTO:
        raise ValueError(
            "per_device_train_batch_size=auto needs a plan of activations, and the workers have none of own code "
            "(code); write a number"
        )


def _check_units(strategy: StrategySpec, code: CodeSpec) -> None:
    if strategy.ulysses_size > 1 and not code.sequence:
        raise ValueError(
            f"ulysses_size={strategy.ulysses_size} splits sequences, and code.sequence does not say which entries of "
            "the batch have them; write, for example, code.sequence: {tokens: 1}, or choose ulysses_size: 1"
        )
    if strategy.precision:
        raise ValueError(
            "precision is not proven for own code (code), whose loss may use modules in any way; cast in your module, "
            "and remove precision"
        )
    for name in ("wrap_embeddings", "wrap_lm_output"):
        if getattr(strategy.wrap_policy, name):
            raise ValueError(
                f"wrap_policy.{name} needs a part that the loop does not find in own code (code); name its class in "
                "wrap_policy.transformer_layer_cls_to_wrap"
            )
