"""Causal language models of transformers on the meta device, and the kinds that this loop does not train."""

import difflib
import re
import sys
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from train_loop.errors import ModelError
from train_loop.model.build import DTYPES
from train_loop.model.families.causal.config_faults import stated, with_values
from train_loop.model.families.causal.refused import check_encoder, check_name
from train_loop.model.folder import model_config
from train_loop.plan import NEEDED
from train_loop.spec import LabelHeadSpec, ModelSpec

SOURCE = f"transformers {transformers.__version__}"
_UNDECLARED = ("head_dim", "rope_theta", "rope_type", "partial_rotary_factor")
"""Fields that transformers reads although not every config class declares them."""
_OF_TOKEN_HEADS = ("classifier_dropout",)
"""Fields that heads of a label per token read, 0.1 without it."""


def build_model(spec: ModelSpec) -> PreTrainedModel:
    """Build the model on the meta device, without memory and weights. Raises ModelError."""

    def build() -> PreTrainedModel:
        check_name(model_config(spec)["model_type"])
        hf_config = _hf_config(spec.config, spec.label_head) if spec.config is not None else _folder_config(spec)
        (check_kind if spec.masked is None else check_masked_kind)(hf_config)
        built = _on_meta(hf_config, DTYPES[spec.master_dtype], spec.label_head, masked=spec.masked is not None)
        if pools(built):
            # transformers would read the last token that is not `pad_token_id`, which may be one of the text.
            built.forward = MethodType(_scores_at_ends, built)
        return built

    try:
        model = build()
    except ModelError:
        raise
    except Exception as error:  # transformers' errors for a config have no common class
        _check_alone(model_config(spec)["model_type"], None)
        reason = stated(error)
        if reason is None:
            reason = f"{SOURCE} cannot build it {with_values(error, build, of=PretrainedConfig)}"
        kind = "causal" if spec.masked is None else "masked"
        raise ModelError(
            f"{spec.path or 'model.config'} is not a valid {kind} language model: {reason}; correct the config"
        ) from error
    check_layers(model)
    model.train()
    return model


def _on_meta(
    config: PretrainedConfig, dtype: torch.dtype, head: LabelHeadSpec | None = None, *, masked: bool = False
) -> PreTrainedModel:
    """Build the model of a config, with SDPA if transformers has it for the family. Raises ModelError."""
    of_tokens = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    auto = of_tokens if head is None else _auto_class(config, head)

    def build(attention: str) -> PreTrainedModel:
        with torch.device("meta"):
            model: PreTrainedModel = auto.from_config(config, attn_implementation=attention, dtype=dtype)
        return model

    try:
        return build("sdpa")
    except Exception as error:  # transformers' errors for a config have no common class
        if stated(error) is None:
            check_sparse(config)
        if not isinstance(error, ValueError) or "scaled_dot_product_attention" not in str(error):
            raise
    return build("eager")


def _auto_class(config: PretrainedConfig, head: LabelHeadSpec) -> Any:
    """Return the class that builds a model with a head of labels, and give the config their number.

    Raises ModelError for a family whose head has rules of its own.
    """
    auto, generic = (
        (AutoModelForSequenceClassification, GenericForSequenceClassification)
        if head.pools
        else (AutoModelForTokenClassification, GenericForTokenClassification)
    )
    kind = auto._model_mapping.get(type(config), None)
    if kind is None or not issubclass(kind, generic) or kind.forward is not generic.forward:
        has = "has none for" if kind is None else "computes it in a way of its own in"
        raise ModelError(
            f"model.head={head.name} is not supported for this family: {SOURCE} {has} "
            f"{config.model_type if kind is None else kind.__name__}; choose another family, for example qwen3 or llama"
        )
    config.num_labels = head.labels
    if head.pools:
        config.problem_type = "single_label_classification" if head.classes else "regression"
    return auto


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


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the linear map to logits of tokens or of labels."""
    head: nn.Module | None = model.score if has_labels(model) else model.get_output_embeddings()
    return head


def decoder_class(model: PreTrainedModel) -> type:
    """Return the class of the causal language model with a model's config."""
    return type(model) if not has_labels(model) else MODEL_FOR_CAUSAL_LM_MAPPING[type(config_of(model))]


def _hf_config(config: dict[str, Any], head: LabelHeadSpec | None) -> PretrainedConfig:
    """Return the config in its transformers class. Raises ModelError for a field that the class does not have.

    transformers itself keeps a misspelled field and trains with the default.
    """
    hf_config = _config_of_type(config)
    known = {*dir(type(hf_config)), *_UNDECLARED, *([] if head is None or head.pools else _OF_TOKEN_HEADS)}
    for name in sorted(config.keys() - known):
        remedy = f"set model.{name}" if name in ModelSpec.model_fields else _near(name, known) or "remove it"
        raise ModelError(f"{type(hf_config).__name__} has no field {name}; {remedy}")
    return hf_config


def _config_of_type(config: dict[str, Any]) -> PretrainedConfig:
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        remedy = _near(kind, CONFIG_MAPPING) or "choose a supported one, for example qwen3 or llama"
        raise ModelError(f"{SOURCE} does not support model_type={kind}; {remedy}")
    return AutoConfig.for_model(**config)


def _near(name: str, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else None


def _folder_config(spec: ModelSpec) -> PretrainedConfig:
    """Return the config of a folder.

    It may have any field, because transformers writes more fields than its classes declare.
    """
    config = model_config(spec)
    if config.get("quantization_config"):
        raise ModelError(f"{spec.path} holds quantised weights, which cannot be trained; give the original model")
    # Code that comes with a model is never run. Many folders contain code although transformers has the model too.
    if config.pop("auto_map", None) and config["model_type"] not in CONFIG_MAPPING:
        raise ModelError(
            f"{spec.path} needs custom code (auto_map), and the code in a model's folder is not run; choose a model "
            "that transformers supports"
        )
    return _config_of_type(config)


def config_of(model: PreTrainedModel) -> PretrainedConfig:
    """Return the config of a model, which has one part: `check_kind` has refused all others."""
    return model.config


def embeddings_of(model: PreTrainedModel) -> nn.Embedding:
    """Return the table of token vectors of a model."""
    table: nn.Embedding = model.get_input_embeddings()
    return table


def check_kind(config: PretrainedConfig) -> None:
    """Raise ModelError for a config of anything else than a language model alone."""
    kind = config.model_type
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{SOURCE} has no causal language model for model_type={kind}; choose a "
            "decoder of text, for example qwen3 or llama"
        )
    _check_alone(kind, config)
    if getattr(config, "add_cross_attention", False):
        raise ModelError(
            "add_cross_attention: true needs the output of an encoder, which a causal language model does not have; "
            "set it to false"
        )


def _check_alone(kind: str, config: PretrainedConfig | None) -> None:
    """Raise ModelError for a model that has a language model as one of its parts.

    Without a valid config, its class decides.
    """
    parts = CONFIG_MAPPING[kind].sub_configs if kind in CONFIG_MAPPING else {}
    if _has_parts(config) if config is not None else "text_config" in parts:
        raise ModelError(
            f"not supported: model_type={kind} has a language model as one of its parts, with others such as vision or "
            f"audio; {_dense_text(config) or 'give a folder of a language model alone'}"
        )


def _dense_text(config: PretrainedConfig | None) -> str | None:
    """Return the advice to train the text part of a config; None if that is no model of its own, or sparse."""
    text: Any = getattr(config, "text_config", None)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(text, "model_type", None))
    if name is None or _has_experts(MODEL_FOR_CAUSAL_LM_MAPPING[type(text)], text):
        return None
    return f"train that part alone: model_type={text.model_type}"


def check_masked_kind(config: PretrainedConfig) -> None:
    """Raise ModelError for a config of anything else than a masked language model that sees whole rows."""
    kind = config.model_type
    if kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES or config.is_encoder_decoder or _has_parts(config):
        raise ModelError(
            f"model.head=masked_lm needs an encoder of text alone, and model_type={kind} is none in {SOURCE}; choose "
            "one, for example modernbert or bert"
        )
    check_encoder(config)


def _has_parts(config: PretrainedConfig) -> bool:
    try:
        return config.get_text_config() is not config
    except ValueError:  # it has several
        return True


def check_dense(model: PreTrainedModel) -> None:
    """Raise ModelError for a mixture of experts."""
    names = {type(module).__name__ for module in model.modules()}
    experts = sorted(n for n in names if "Expert" in n) or sorted(n for n in names if n.endswith("MoE"))
    if experts:
        raise ModelError(
            f"not supported yet: mixture of experts ({', '.join(experts)} in {type(model).__name__}); choose a dense "
            "model"
        )


def check_sparse(config: PretrainedConfig) -> None:
    """Raise ModelError for a mixture of experts that transformers does not build, so that its modules are unknown."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is not None and _has_experts(kind, config):
        raise ModelError(f"not supported yet: mixture of experts ({kind.__name__}); choose a dense model")


_DECODER = "a decoder with attention heads, for example qwen3 or llama"


def check_decoder(model: PreTrainedModel, *, another: str = _DECODER) -> None:
    """Raise ModelError for a model that is not dense, or has no sizes of a decoder; `another` is the remedy."""
    check_dense(model)
    # A model with a recurrent state may have no attention.
    needed = [name for name in NEEDED if name != "num_attention_heads" or not model._is_stateful]
    missing = [name for name in needed if not isinstance(getattr(model.config, name, None), int)]
    if missing:
        raise ModelError(
            f"{type(model).__name__} is not supported: its config has no {', '.join(missing)}; choose {another}"
        )


ATTENDING = {"full_attention", "sliding_attention", "hybrid"}
"""Types of layers that have attention."""
_LAYERS = ATTENDING | {"linear_attention", "conv"}
"""Types of layers that compute plain rows in this loop as in transformers; a small copy shows the rest."""


def check_layers(model: PreTrainedModel) -> None:
    """Raise ModelError for types of layers that need other masks, or select tokens."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    strange = sorted(kinds - _LAYERS)
    if strange:
        check_dense(model)
        raise ModelError(
            f"not supported yet: {model.config.model_type} has layers of type {', '.join(strange)}; choose a model "
            "whose layers have full, sliding or linear attention"
        )


def _has_experts(kind: type, config: PretrainedConfig) -> bool:
    """Return whether a family's models are mixtures of experts, unless its config says that this one is dense."""
    if getattr(config, "is_moe", None) is False:
        return False
    numbers = [value for name, value in vars(config).items() if re.search("expert", name) and type(value) is int]
    return any("Expert" in name for name in vars(sys.modules[kind.__module__])) and (not numbers or any(numbers))
