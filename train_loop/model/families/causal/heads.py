"""Heads of labels: models of transformers that give scores of labels, of rows or of tokens."""

from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import SequenceClassifierOutput

Model = TypeVar("Model", bound=nn.Module)


def with_label_head(model: Model) -> Model:
    """Let a model with a label per row read it from the ends of documents, which its call names.

    transformers would read it from the last token that is not `pad_token_id`, which may be a token of the text.
    """
    if isinstance(model, GenericForSequenceClassification):
        model.forward = MethodType(_scores_at_ends, model)
    return model


def _scores_at_ends(model: Any, *, ends: Tensor | None = None, **arguments: Any) -> SequenceClassifierOutput:
    """Return the scores [B, labels] at positions `ends` [B], or without them those of all tokens [B, T, labels]."""
    hidden = model.base_model(**arguments).last_hidden_state
    if ends is not None:
        hidden = hidden[torch.arange(len(ends), device=ends.device), ends]
    # An output class of transformers, in which FSDP2 finds the tensor.
    return SequenceClassifierOutput(logits=model.score(hidden))


def pools(model: nn.Module) -> bool:
    """Return whether a model gives one result per row."""
    return isinstance(model, GenericForSequenceClassification)


def has_labels(model: nn.Module) -> bool:
    """Return whether a model's logits are of labels."""
    return isinstance(model, GenericForSequenceClassification | GenericForTokenClassification)
