"""Embeddings of texts: a model without a head, whose states of a row's tokens become one vector."""

import json
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train_loop.errors import ModelError
from train_loop.model.families.causal.build import config_of, output_of
from train_loop.model.sentence.rule import EmbeddingRule
from train_loop.run_dir import make_folder, write_durably

_MODES = {"last_token": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}
"""Names of sentence-transformers for each pooling."""


def embedding_of(model: nn.Module) -> EmbeddingRule | None:
    """Return the rule by which a model embeds rows; None for models with a head."""
    return getattr(model, "row_embedding", None)


def check_pooling(model: nn.Module) -> None:
    """Raise ModelError if a decoder's embeddings are those of tokens that see no others."""
    head = embedding_of(model)
    if head is not None and head.pooling == "cls":
        raise ModelError(
            "model.head.embedding.pooling=cls takes a row's first token, which sees no other one in a decoder; choose "
            "last_token or mean"
        )


def share_rows(model: Any, part: Any) -> None:
    """Let a model that embeds rows do so from this rank's `SequencePart` of each, without gradients; others stay."""
    if embedding_of(model) is not None:
        model.sequence_part = part


def embed_rows(model: Any) -> None:
    """Make a model that embeds rows do so when it is called, in place; other models stay."""
    if embedding_of(model) is None:
        return
    model.forward = MethodType(_embed, model)
    if getattr(model, "pooler", None) is not None:
        # The pooler of BERT and its kind reads the first token for another task.
        model.pooler = None


def _embed(model: Any, *, ends: Tensor | None = None, **arguments: Any) -> Any:
    """Return the embeddings [B, H] of rows whose last tokens are at `ends` [B]; without these the states [B, T, H]."""
    states = type(model).forward(model, **arguments).last_hidden_state
    part = getattr(model, "sequence_part", None)
    return output_of(states if ends is None else _pooled(states, ends, model.row_embedding, part))


def _pooled(states: Tensor, ends: Tensor, head: EmbeddingRule, part: Any) -> Tensor:
    """Return embeddings [B, H] of states [B, T/P, H] and whole rows' ends. A collective call of a part's ranks."""
    # A row of padding has no tokens: it gets its first state, and no weight in the loss.
    ends, width = ends.clamp(min=0), states.shape[1]
    first = 0 if part is None else part.rank * width
    if head.pooling == "mean":
        is_token = torch.arange(first, first + width, device=ends.device) <= ends[:, None]
        pooled = (states.float() * is_token[..., None]).sum(1)
    else:
        places = (ends if head.pooling == "last_token" else torch.zeros_like(ends)) - first
        pooled = states[torch.arange(len(ends), device=ends.device), places.clamp(0, width - 1)]
        if part is not None:
            pooled = pooled.where(((places >= 0) & (places < width))[:, None], 0)
    if part is not None:
        dist.all_reduce(pooled, group=part.group)
    if head.pooling == "mean":
        pooled = pooled / (ends + 1)[:, None]
    return nn.functional.normalize(pooled.float(), dim=-1) if head.normalize else pooled


def write_sentence_configs(model: Any, folder: Path) -> None:
    """Write the files of sentence-transformers into an export, so that it embeds texts as the run did."""
    head = embedding_of(model)
    if head is None:
        return
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if head.normalize else [])]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(parts)
    ]
    pooling = {f"pooling_mode_{mode}": mode == _MODES[head.pooling] for mode in _MODES.values()}
    similarity = "cosine" if head.normalize else "dot"
    for path, _ in parts[1:]:
        make_folder(folder / path)
    for name, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"word_embedding_dimension": config_of(model).hidden_size} | pooling),
        ("config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": similarity}),
    ):
        write_durably(folder / name, json.dumps(content, indent=2) + "\n")
