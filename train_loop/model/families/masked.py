"""Masked language models of transformers: encoders that see whole rows, such as BERT and ModernBERT."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from train_loop.errors import ModelError
from train_loop.model.families.after_head import HeadWatch, Step
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.causal.build import build_model, check_decoder, config_of
from train_loop.model.families.causal.config import why_not_called
from train_loop.model.families.causal.embeddings import embed_rows, embedding_of
from train_loop.model.families.causal.experts import check_experts, check_no_experts
from train_loop.model.families.causal.family import Causal
from train_loop.model.families.causal.heads import has_labels
from train_loop.model.families.causal.positions import rotated_positions
from train_loop.model.families.causal.probe import choose_language
from train_loop.model.families.causal.refused import check_fields, check_padding_token
from train_loop.model.families.causal.small_copy import (
    SmallCopyError,
    compute_on_copy,
    named_in_any_layer,
    special_tokens,
    unused_names,
)
from train_loop.model.families.family import (
    Attention,
    Examination,
    Family,
    SettingCheck,
    StoredNames,
    fault_without_plan,
    rejecting,
)
from train_loop.model.sentence.rule import EmbeddingRule
from train_loop.spec import JobSpec, ModelSpec

_POOLER = re.compile(r"(^|\.)pooler\.")
_POSITIONS = re.compile(r"(^|\.)position_embeddings$")
_LENGTH, _PADDING = 24, 8
"""Tokens of the row of the check, and padding behind it."""
_TOLERANCE = 1e-4
"""Largest relative difference of logits from rounding in float32; other inputs cause much larger ones."""


class Masked(Causal):
    """The family of all masked language models of transformers. Each is called as by transformers: with a padding mask.

    It shares weights, names and initialisation with causal language models.
    """

    def build(self, spec: ModelSpec) -> Anatomy:
        """Build a dense encoder on the meta device. Raises ModelError."""
        model = build_model(spec)
        check_no_experts(model, another="modernbert or bert")
        check_decoder(model, another="an encoder with attention heads, for example modernbert or bert")
        embed_rows(model)
        return self.anatomy(model)

    def anatomy(self, model: Any) -> Anatomy:
        """Return the parts of a model. Its layers are those of its longest list: few encoders state them."""
        return replace(super().anatomy(model), layers=_largest_list(model))

    def examine(self, anatomy: Anatomy, spec: JobSpec) -> Examination:
        """Call a small copy with and without padding. Raises ModelError."""
        name, length = type(anatomy.model).__name__, spec.data.sequence_length
        check_fields(name, config_of(anatomy.model))
        found, most = _measure_copy(anatomy.model, length), _positions(anatomy.model)
        after_head = found.after_head

        def check_head() -> None:
            if spec.training.chunked_loss and after_head is None:
                raise ModelError(
                    f"chunked_loss needs logits that are the output of the head, and {name} changes them; remove "
                    "chunked_loss"
                )

        def check_positions() -> None:
            if most is not None and length > most:
                raise ModelError(
                    f"sequence_length={length} is more than the {most} positions of {name}; choose at most {most}, or "
                    "a model with more"
                )

        settings = (
            SettingCheck("/model/config", lambda: check_padding_token(anatomy, spec)),
            SettingCheck("/data/packing", lambda: _check_packing(spec, name)),
            SettingCheck("/strategy/ulysses_size", lambda: _check_slices(spec, name)),
            SettingCheck("/training/chunked_loss", check_head),
            SettingCheck("/data/sequence_length", check_positions),
            *rejecting({"/strategy/tp_size": fault_without_plan(name, spec)}),
            *check_experts(anatomy.model, None, spec),
        )
        unused = named_in_any_layer(anatomy.model, found.unused)
        rotated = rotated_positions(config_of(anatomy.model))
        return Examination(
            {}, after_head, settings, sees_whole_rows=True, rotated=rotated, unused=unused, prepare=choose_language
        )

    def fit_positions(self, model: nn.Module, *, part: int, parts: int) -> None:
        """Do nothing: the spec has refused parts of sequences."""

    def divert_attention(self, model: nn.Module) -> Attention:
        """Raise ModelError."""
        return Family.divert_attention(self, model)

    def stored_names(self, model: Any, stored: Mapping[str, tuple[int, ...]]) -> StoredNames:
        """Map names as for causal models. A folder may lack the whole head, and may have those of other tasks."""
        found, base = super().stored_names(model, stored), f"{model.base_model_prefix}."
        # Tied tensors come first under the name of the base model.
        head = frozenset(name for name, _ in model.named_parameters() if not name.startswith(base))
        has_head = embedding_of(model) is not None or not head.isdisjoint(found.own.values())
        known = model.state_dict().keys()
        other = {name for name, own in found.own.items() if own not in known and _is_of_other_task(own, base)}
        optional = found.optional | (frozenset() if has_head else head)
        if has_labels(model):
            # Masked language models are stored without the pooler, which some heads of rows read.
            optional |= {one for one in known if _POOLER.search(one)}
        return StoredNames(found.own, found.unused | other, optional, found.joins)

    def arguments(self, model: Any, columns: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the mask of padding [B, T]. A row that is only padding attends to one token, so that it has no NaN."""
        lengths = columns["length"].clamp(min=1)
        places = torch.arange(columns["input_ids"].shape[1], device=lengths.device)
        ends = {} if embedding_of(model) is None else {"ends": columns["length"] - 1}
        return ends | {"attention_mask": (places < lengths[:, None]).long()}

    def call(self, model: Any, columns: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Tensor:
        """Return the logits."""
        logits: Tensor = model(input_ids=columns["input_ids"], **arguments).logits
        return logits


MASKED = Masked()


def _check_packing(spec: JobSpec, name: str) -> None:
    if spec.data.packing:
        raise ModelError(f"{name} attends to the whole row, which must be one document; set packing: false")


def _check_slices(spec: JobSpec, name: str) -> None:
    if (size := spec.strategy.ulysses_size) > 1:
        raise ModelError(
            f"ulysses_size={size} cannot split a sequence of {name}, which attends to the whole row; choose "
            "ulysses_size: 1"
        )


def _largest_list(model: nn.Module) -> tuple[nn.Module, ...]:
    # MarkupLM has lists of tables.
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList) and not _has_tables(one)]
    largest = max(lists, key=lambda one: sum(p.numel() for p in one.parameters()), default=None)
    return () if largest is None else tuple(largest)


def _has_tables(modules: nn.ModuleList) -> bool:
    return any(isinstance(one, nn.Embedding) for one in modules)


def _is_of_other_task(name: str, base: str) -> bool:
    return not name.startswith(base) or _POOLER.search(name) is not None


def _positions(model: nn.Module) -> int | None:
    """Return the number of positions that a model has a table for; None without a table."""
    tables = [one for name, one in model.named_modules() if _POSITIONS.search(name) and isinstance(one, nn.Embedding)]
    # Positions of RoBERTa and its kind begin behind the padding token.
    return min(
        (one.num_embeddings - (-1 if one.padding_idx is None else one.padding_idx) - 1 for one in tables), default=None
    )


class _Measured(NamedTuple):
    """Properties of a model that a small copy shows."""

    padding: float
    """Relative difference between a row's logits alone, and with padding in a batch."""
    after_head: tuple[Step, ...] | None
    """() if the head gives the logits; None if not: steps of other sizes may have other numbers."""
    calls_layers: bool
    """True if the layers are called as modules, so that FSDP2's hooks gather their parameters."""
    unused: frozenset[str]
    """Names in any layer of parameters without a gradient."""


def _measure_copy(model: Any, length: int) -> _Measured:
    """Return the properties that a small copy shows. Raises ModelError without one, or if padding changes logits."""
    kind: Any = type(model)
    name, config = kind.__name__, config_of(model)
    try:
        found = _measured(kind, json.dumps(config.to_dict()), length, embedding_of(model))
    except SmallCopyError as error:
        raise ModelError(
            f"{name} cannot be called with input_ids and a padding mask{why_not_called(error.__cause__, config)}; "
            "correct its config, or choose another model"
        ) from error
    if math.isnan(found.padding):
        raise ModelError(f"{name} computes values that are not finite with this config; correct its numbers")
    if not found.padding < _TOLERANCE:
        raise ModelError(
            f"{name} is not supported: its logits of a row depend on the padding behind it, whose length differs "
            "between batches; choose another model, for example modernbert or bert"
        )
    if not found.calls_layers:
        raise ModelError(
            f"{name} is not supported: its code calls the forward functions of its layers and not the layers, so that "
            "they cannot be sharded; choose another model, for example modernbert or bert"
        )
    return found


@lru_cache(maxsize=64)
def _measured(kind: Any, config: str, length: int, embedding: EmbeddingRule | None) -> _Measured:
    return compute_on_copy(kind, json.loads(config), partial(_measure, embedding=embedding), length=length)


def _measure(model: Any, *, embedding: EmbeddingRule | None) -> _Measured:
    model.row_embedding = embedding
    embed_rows(model)
    anatomy, watch, plain = MASKED.anatomy(model), HeadWatch(), _plain_tokens(model)
    if anatomy.head is not None:
        anatomy.head.register_forward_hook(lambda _, __, out: watch.follow(out))
    called = set[nn.Module]()
    for layer in anatomy.layers:
        layer.register_forward_hook(lambda module, _, __: called.add(module))
    row = torch.tensor([plain[place % len(plain)] for place in range(_LENGTH + _PADDING)])[None]
    columns = {"input_ids": row.expand(2, -1), "length": torch.tensor([_LENGTH, _LENGTH + _PADDING])}
    with torch.no_grad(), watch:
        alone = MASKED.call(model, {"input_ids": row[:, :_LENGTH]}, {})
        after_head = watch.steps(alone)
        mask = MASKED.arguments(model, columns)["attention_mask"]
    padded = MASKED.call(model, columns, {"attention_mask": mask})[:1, :_LENGTH]
    difference = float((alone - padded.detach()).norm() / alone.norm())
    steps = None if after_head else after_head
    return _Measured(difference, steps, called == set(anatomy.layers), unused_names(model, padded))


def _plain_tokens(model: Any) -> Sequence[int]:
    special = special_tokens(config_of(model).to_dict())
    return [token for token in range(MASKED.anatomy(model).vocabulary or 0) if token not in special]
