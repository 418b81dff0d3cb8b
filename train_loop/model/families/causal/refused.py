"""Models that are not trained, for reasons that no call of a small copy shows; each with another choice."""

import json
from typing import Any

from torch import nn

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.spec import JobSpec

_OTHER_EXPERTS = "whose experts do not have transformers' common form; choose another mixture, for example qwen3_moe"
_NOT_YET = {
    "blt": "whose layers see patches of bytes, which another model cuts; choose a model of tokens, for example qwen3",
    "mra": "whose attention needs kernels that are downloaded during the run; choose modernbert or bert",
    "reformer": "whose attention selects tokens by hashes; choose a model with full or sliding attention",
    **dict.fromkeys(("dbrx", "jetmoe", "longcat_flash"), _OTHER_EXPERTS),
    "gemma4_assistant": "which drafts tokens for another model; choose gemma4_text",
    "gemma4_unified_assistant": "which drafts tokens for another model; choose gemma4_unified_text",
}
"""Families that are not trained, with the reason and another choice."""


def check_name(kind: str) -> None:
    """Raise ModelError for a family that is not trained yet, whatever its config says."""
    if kind in _NOT_YET:
        raise ModelError(f"not supported yet: model_type={kind}, {_NOT_YET[kind]}")


def check_decoder_name(kind: str, dtype: str) -> None:
    """Raise ModelError for a family that is trained with masks of padding alone, or not in a dtype."""
    if kind == "minimax" and dtype != "fp32":
        raise ModelError(
            f"dtype={dtype} is not supported for model_type=minimax, whose attention multiplies numbers in fp32 with "
            "others; choose fp32"
        )
    if kind == "xlm":
        raise ModelError(
            "not supported yet: a decoder of model_type=xlm, whose code takes tokens of the text for padding; choose "
            "another one, for example gpt2"
        )


_TO_LEAVE_OUT = {"return_dict": True, "chunk_size_feed_forward": 0}
"""Fields that change the form of a model's output, or lengths that it accepts, by their only value."""
_RATES = ("decoder_layerdrop", "layerdrop")
"""Fields with the probability of skipping a layer, the preferred one first."""


def check_padding_token(anatomy: Anatomy, spec: JobSpec) -> None:
    """Raise ModelError if padding is a token of text: RoBERTa's kind gives it no position and no trained vector."""
    token = getattr(anatomy.embeddings, "padding_idx", None)
    if spec.trains_tokenizer and token:
        raise ModelError(
            f"pad_token_id={token} of {type(anatomy.model).__name__} is a token of text in a tokenizer that is trained "
            "on the data; set pad_token_id: 0, or name the model's own tokenizer in model.tokenizer"
        )


def check_language(config: Any) -> None:
    """Raise ModelError for a config of XMOD that does not say whose language's adapters a run trains."""
    languages = getattr(config, "languages", None)
    if languages and (language := getattr(config, "default_language", None)) not in languages:
        raise ModelError(
            f"default_language: {json.dumps(language)} is not one of the languages {', '.join(map(str, languages))}, "
            f"and the rows of a run pass the adapters of one; set default_language: {json.dumps(languages[0])} in the "
            "model's config, or another of them"
        )


def check_modes(model: nn.Module, config: Any) -> None:
    """Raise ModelError for a model whose ranks would wait for each other, or whose evaluation changes its weights."""
    name = type(model).__name__
    check_fields(name, config)
    rate = max((getattr(module, "layerdrop", 0) for module in model.modules()), default=0)
    if rate:
        field = next(field for field in _RATES if hasattr(config, field))
        raise ModelError(
            f"{name} skips a layer with probability {rate} in training, and each rank skips others, so that ranks "
            f"would wait for each other; set {field}: 0.0 in the model's config"
        )
    if 0 < getattr(config, "rescale_every", 0) < config.num_hidden_layers:
        raise ModelError(
            f"{name} divides its weights before an evaluation (rescale_every={config.rescale_every}), so that a "
            "checkpoint after it would have others; set rescale_every: 0 in the model's config"
        )


def check_fields(name: str, config: Any) -> None:
    """Raise ModelError for a field with which the model called `name` cannot be called, or has no dropout."""
    for field, value in config.to_dict().items():
        if "dropout" in field and isinstance(value, int | float) and not 0 <= value <= 1:
            raise ModelError(f"{field}={value} is not a probability; correct it in the model's config")
        if field in _TO_LEAVE_OUT and value is not None and value != _TO_LEAVE_OUT[field]:
            raise ModelError(
                f"{field}={value} does not fit this loop's call of {name}; remove it from the model's config"
            )


_OF_ENCODERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_decoder": ((False,), "a masked language model also sees later tokens"),
    "add_cross_attention": ((False,), "a masked language model has no other model's output to attend to"),
    "attention_type": (
        ("original_full", "relative_shift", "factorized"),
        "its attention draws random tokens, which a resumed run cannot repeat",
    ),
    "layerdrop": ((0.0,), "each rank would leave out other layers, and ranks wait for each other in all of them"),
    "asm": ((False,), "an adaptive softmax has no table of logits"),
}
"""Values of fields with which encoders are right in this loop, the plainest first, and the fault of others."""


def check_encoder(config: Any) -> None:
    """Raise ModelError for a config with which an encoder is not right in this loop."""
    for field, (right, reason) in _OF_ENCODERS.items():
        if (value := getattr(config, field, None)) not in (None, *right):
            raise ModelError(
                f"{field}: {json.dumps(value)} is not supported for {config.model_type}: {reason}; set it to "
                f"{json.dumps(right[0])}"
            )


ATTENDING = {"full_attention", "sliding_attention", "chunked_attention", "hybrid"}
"""Types of layers that have attention."""
_LAYERS = ATTENDING | {"linear_attention", "conv", "mlp", "moe"}
"""Types of layers that compute plain rows in this loop as in transformers; a small copy shows the rest."""


def check_layers(config: Any) -> None:
    """Raise ModelError for types of layers that need other masks, or select tokens."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    strange = sorted(kinds - _LAYERS)
    if strange:
        raise ModelError(
            f"not supported yet: {config.model_type} has layers of type {', '.join(strange)}; choose a model "
            "whose layers have full, sliding, chunked or linear attention"
        )
