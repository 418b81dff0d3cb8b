"""Causal language models of transformers."""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from train_loop.errors import ModelError
from train_loop.model.build import DTYPES
from train_loop.model.families.anatomy import Anatomy, is_norm
from train_loop.model.families.causal.attention import (
    apply_attention,
    attention_inputs,
    attention_replaced,
    divert_attention,
    register_attention,
)
from train_loop.model.families.causal.build import (
    Model,
    build_model,
    check_decoder,
    config_of,
    decoder_of,
    embeddings_of,
    initialise_by,
    kernel_of,
    layers_of,
    set_constants,
    tie,
)
from train_loop.model.families.causal.cache import extend, is_exact, prefill
from train_loop.model.families.causal.config import SOURCE, stated
from train_loop.model.families.causal.embeddings import (
    check_pooling,
    embed_rows,
    embedding_of,
    share_rows,
    write_sentence_configs,
)
from train_loop.model.families.causal.experts import (
    anatomy_of_experts,
    check_experts,
    check_fused,
    choose_experts,
    experts_of,
    prepare_experts,
)
from train_loop.model.families.causal.heads import (
    check_labels,
    has_labels,
    head_of,
    names_outside,
    pools,
    read_at_ends,
)
from train_loop.model.families.causal.parallel.expert import share_experts
from train_loop.model.families.causal.parallel.part import cut_layers, held_by_rank
from train_loop.model.families.causal.parallel.sequence import SplitStates
from train_loop.model.families.causal.parallel.tensor import check_plan, expanded_plan, heads_of_rank, share_layers
from train_loop.model.families.causal.parallel.token_parts import SharedParts
from train_loop.model.families.causal.positions import (
    apply_counted,
    apply_longrope,
    padding_of,
    position_inputs,
    rotated_positions,
)
from train_loop.model.families.causal.probe import (
    check_attention,
    check_head,
    check_positions,
    check_recomputation,
    choose_language,
    keep_attention,
    kept_for_backward,
    probe,
)
from train_loop.model.families.causal.published import own_names, splits, write_configs
from train_loop.model.families.causal.refused import ATTENDING, check_decoder_name, check_modes, check_padding_token
from train_loop.model.families.causal.separation import check_causal, check_packing, measure_copy
from train_loop.model.families.causal.small_copy import named_in_any_layer
from train_loop.model.families.family import (
    Attention,
    AttentionUse,
    Examination,
    ExportFacts,
    Family,
    SettingCheck,
    Split,
    StoredNames,
)
from train_loop.spec import JobSpec, ModelSpec
from train_loop.telemetry.timers import ComputeTimer

_HARMLESS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Tensors of older folders that models now compute."""
_OLD_MASKS = re.compile(r"(^|\.)att(n|ention)\.(masked_)?bias$")
"""Causal masks and their fill values, which GPT-2, GPT-NeoX and others once stored as buffers."""


class Causal(Family):
    """The family of all causal language models of transformers."""

    source = SOURCE

    def build(self, spec: ModelSpec) -> Anatomy:
        """Build a model on the meta device. Raises ModelError."""
        model = build_model(spec)
        check_decoder(model)
        check_fused(model)
        prepare_experts(model)
        check_pooling(model)
        register_attention(model)
        read_at_ends(model)
        embed_rows(model)
        return self.anatomy(model)

    def anatomy(self, model: Model) -> Anatomy:
        """Return the parts of a model."""
        config = config_of(model)
        heads, types = getattr(config, "num_attention_heads", None), getattr(config, "layer_types", None)
        return Anatomy(
            model,
            self,
            layers=tuple(layers_of(model)),
            embeddings=embeddings_of(model),
            head=head_of(model),
            norms=tuple(one for one in model.modules() if is_norm(one)),
            depth=sum(kind in ATTENDING for kind in types) if types else config.num_hidden_layers if heads else 0,
            attention_width=heads * (getattr(config, "head_dim", None) or config.hidden_size // heads) if heads else 0,
            labels=config.num_labels if has_labels(model) else 0 if embedding_of(model) is not None else None,
            experts=anatomy_of_experts(model, config),
        )

    def examine(self, anatomy: Anatomy, spec: JobSpec) -> Examination:
        """Call a copy of a model without weights, and a small copy with weights, in the dtype of training."""
        dtype, length = DTYPES[spec.strategy.param_dtype], spec.positions
        config = config_of(anatomy.model)
        check_decoder_name(config.model_type, spec.strategy.param_dtype)
        check_modes(anatomy.model, config)
        check_causal(measure_copy(anatomy.model, length), anatomy.model)
        seen = probe(anatomy, dtype, sequence_length=length)
        if padding_of(anatomy.model) is not None:
            check_padding_token(anatomy, spec)
        settings = (
            SettingCheck("/data/packing", lambda: check_packing(seen.separation, spec, seen.model)),
            SettingCheck("/strategy/ulysses_size", lambda: check_attention(seen, spec)),
            SettingCheck("/strategy/tp_size", lambda: check_plan(anatomy.model, seen, spec)),
            SettingCheck("/model/gradient_checkpointing", lambda: check_recomputation(seen, spec)),
            SettingCheck("/training/chunked_loss", lambda: check_head(seen, spec)),
            SettingCheck("/data/sequence_length", lambda: check_positions(seen, spec)),
            *check_experts(anatomy.model, anatomy.experts, spec),
        )
        whole = getattr(anatomy.model, "_supports_sdpa", True) is False and bool(anatomy.depth)
        sharing: dict[str, Any] = {"attention": seen.attention, "size": spec.strategy.tp_size}
        parts, tiles = spec.strategy.token_parts, spec.strategy.tiled_num_shards
        cut: Callable[[nn.Module], None] = partial(cut_layers, **sharing, parts=parts)

        def prepare(model: nn.Module) -> None:
            model.takes_only_tokens = takes_only_tokens(anatomy.model)  # type: ignore[assignment]
            choose_language(model)
            cut(model)

        return Examination(
            seen.attention,
            seen.after_head,
            settings,
            whole_scores=whole,
            rotated=rotated_positions(config),
            kept=partial(kept_for_backward, anatomy, dtype, length, tiles=tiles, cut=cut, parts=parts),
            held=partial(held_by_rank, anatomy, **sharing),
            unused=named_in_any_layer(anatomy.model, seen.separation.unused),
            prepare=prepare,
        )

    def choose_attention(self, model: Model, spec: JobSpec, device: torch.device) -> None:
        """Set the implementations of attention and experts of a spec. Raises ModelError if they cannot run here."""
        apply_attention(model, spec, device)
        choose_experts(model, spec, device)

    def attention_kernel(self, model: nn.Module) -> str | None:
        """Return the implementation that transformers uses."""
        return kernel_of(model)

    def fit_positions(self, model: Model, *, part: int, parts: int) -> None:
        """Make each document use longrope's factors for its own length, and RoBERTa's kind count its tokens."""
        apply_longrope(model, part=part, parts=parts)
        apply_counted(model, part=part, parts=parts)

    def share_layers(
        self, anatomy: Anatomy, mesh: DeviceMesh, attention: Mapping[str, AttentionUse], *, split_states: bool
    ) -> None:
        """Split the layers by transformers' plan."""
        share_layers(anatomy, mesh, attention, split_states=split_states)

    def split_states(
        self, anatomy: Anatomy, mesh: DeviceMesh, attention: Mapping[str, AttentionUse], timer: ComputeTimer
    ) -> None:
        """Split the states of tokens between the projections of transformers' plan."""
        plan = expanded_plan(anatomy.model, attention, mesh.size())
        parts = SharedParts(mesh.get_group(), timer)
        SplitStates(anatomy.model, plan, attention, parts).watch(anatomy.model)

    def share_experts(self, anatomy: Anatomy, mesh: DeviceMesh, tokens: DeviceMesh) -> None:
        """Split the experts by transformers' plan."""
        share_experts(anatomy, mesh, tokens)

    def heads_of_rank(
        self, model: Model, attention: Mapping[str, AttentionUse], ranks: int
    ) -> Mapping[str, AttentionUse]:
        """Return the heads of each attention module that a rank has if `ranks` of them share the layers."""
        return heads_of_rank(model, attention, ranks)

    def split_sequence(self, model: Model, part: object) -> bool:
        """Let embeddings take states from all parts of a row; attention is diverted."""
        share_rows(model, part)
        return False

    def divert_attention(self, model: Model) -> Attention:
        """Return the function in the transformers registry, which from then on is used only by modules without own."""
        return divert_attention(model)

    def fused_attention(self, model: Model) -> AbstractContextManager[None]:
        """Replace the function in the transformers registry."""
        return attention_replaced(model, keep_attention)

    def initialise(self, model: Model, name: str) -> None:
        """Apply a module's own rule, then those of its parents: GPT-2's redraw some weights of their children.

        As in transformers, the rule is that of the innermost model among a module and its parents.
        """
        parts = name.split(".")
        holders = list(dict.fromkeys(".".join(parts[:depth]) for depth in range(len(parts), -1, -1)))
        for place, holder in enumerate(holders):
            models = (model.get_submodule(parent) for parent in holders[place:])
            owner = next(one for one in models if isinstance(one, Model))
            try:
                initialise_by(owner, model.get_submodule(holder))
            except Exception as error:  # rules have no common error class
                raise ModelError(
                    f"{SOURCE} cannot initialise {holder or type(model).__name__}"
                    f"{f': {said}' if (said := stated(error)) else ''}; correct the config, or choose another model"
                ) from error
        set_constants(model.get_submodule(name))

    def tie(self, model: Model, blueprint: Model) -> None:
        """Tie as the config says."""
        tie(model)

    def stored_names(self, model: Model, stored: Mapping[str, tuple[int, ...]]) -> StoredNames:
        """Map old names and the base model's prefix as transformers does."""
        (own, joins), known = own_names(model, stored), model.state_dict()
        optional, replaced = list(model._keys_to_ignore_on_load_missing or ()), set[str]()
        if has_labels(model):
            check_labels(model, {own[name]: shape for name, shape in stored.items()})
        has_none_of_tokens = has_labels(model) or embedding_of(model) is not None
        if has_none_of_tokens and (decoder := decoder_of(config_of(model))) is not None:
            of_head = names_outside(decoder)
            replaced = {name for name, its in own_names(decoder, stored)[0].items() if its in of_head}
        harmless = [*_HARMLESS, *(model._keys_to_ignore_on_load_unexpected or ())]
        return StoredNames(
            own,
            unused=frozenset(
                name
                for name, shape in stored.items()
                if (name in replaced and own[name] not in known)
                or _matches(own[name], harmless)
                or _is_old_mask(name, shape)
            ),
            optional=frozenset(name for name in known if _matches(name, optional))
            | (names_outside(model) if has_labels(model) else set()),
            joins=joins,
        )

    def splits(self, model: Model, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Split]:
        """Return the public layout of experts; dense models are stored as they are."""
        return splits(model, shapes) if experts_of(model) else {}

    def arguments(self, model: Model, columns: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return masks or bounds of documents, longrope's lengths, and ends for heads that pool."""
        ends = {"ends": columns["length"] - 1} if pools(model) or embedding_of(model) is not None else {}
        if takes_only_tokens(model):
            return ends
        positions = columns["position_ids"]
        more = position_inputs(model, columns["input_ids"], positions, columns["length"])
        return attention_inputs(model, positions) | more | ends

    def call(self, model: Model, columns: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Tensor:
        """Return the logits."""
        positions = {} if takes_only_tokens(model) else {"position_ids": columns["position_ids"]}
        logits: Tensor = model(input_ids=columns["input_ids"], use_cache=False, **positions, **arguments).logits
        return logits

    def caches(self, model: Model, positions: int) -> bool:
        """Return whether a cache is exact for the model, which a small copy shows."""
        return not takes_only_tokens(model) and is_exact(model, positions)

    def prefill(
        self, model: Model, columns: Mapping[str, Tensor], arguments: Mapping[str, Any], last: Tensor
    ) -> tuple[Tensor, Any]:
        """Call the model as in training; its attention keeps keys and values."""
        return prefill(model, columns, arguments, last)

    def extend(self, model: Model, columns: Mapping[str, Tensor], cache: Any) -> tuple[Tensor, Any]:
        """Call the model with transformers' cache, or that of its attention."""
        return extend(model, columns, cache)

    def write_configs(self, model: Model, folder: Path, facts: ExportFacts) -> None:
        """Write config.json and generation_config.json, or the files of sentence-transformers."""
        write_configs(model, config_of(model), folder, facts)
        write_sentence_configs(model, folder)


CAUSAL = Causal()


def takes_only_tokens(model: nn.Module) -> bool:
    """Return whether a model can be called with neither positions nor masks, as a probe has found."""
    return getattr(model, "takes_only_tokens", False)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _is_old_mask(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a causal mask [1, 1, T, T], or the number that filled it, and not a trained bias."""
    is_mask = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return _OLD_MASKS.search(name) is not None and (is_mask or shape in ((), (1,)))
