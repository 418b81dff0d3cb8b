"""Causal language models of transformers on the meta device, and the kinds that this loop does not train."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.activations import XIELUActivation
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from train_loop.errors import ModelError
from train_loop.model.build import DTYPES
from train_loop.model.families.anatomy import modules_of
from train_loop.model.families.causal.config import SOURCE, read_config, stated, with_values
from train_loop.model.families.causal.refused import check_encoder, check_language, check_layers, check_name
from train_loop.model.folder import model_config
from train_loop.model.sentence.rule import embedding_rule
from train_loop.plan import NEEDED
from train_loop.spec import LabelHeadSpec, ModelSpec

Model, Config = PreTrainedModel, PretrainedConfig
"""A model of transformers, and its config, for the other files of this folder."""


def build_model(spec: ModelSpec) -> PreTrainedModel:
    """Build the model on the meta device, without memory and weights. Raises ModelError."""

    def build() -> PreTrainedModel:
        check_name(model_config(spec)["model_type"])
        hf_config = read_config(spec)
        check_language(hf_config)
        is_encoder, head = sees_whole_rows(spec), spec.label_head
        if is_encoder:
            check_encoder_kind(hf_config, head)
        else:
            check_kind(hf_config)
        check_layers(hf_config)
        built = _on_meta(hf_config, DTYPES[spec.master_dtype], head, masked=is_encoder)
        built.row_embedding = embedding_rule(spec)
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
        kind = "masked" if spec.masked is not None else "causal"
        what = f"{kind} language model" if spec.label_head is None else f"model for model.head={spec.label_head.name}"
        raise ModelError(
            f"{spec.path or 'model.config'} is not a valid {what}: {reason}; correct the config"
        ) from error
    model.train()
    return model


def _on_meta(
    config: PretrainedConfig, dtype: torch.dtype, head: LabelHeadSpec | None = None, *, masked: bool = False
) -> PreTrainedModel:
    """Build the model of a config, with SDPA if transformers has it for the family. Raises ModelError."""
    of_tokens = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    auto = of_tokens if head is None else _label_class(config, head)

    def build(attention: str) -> PreTrainedModel:
        with torch.device("meta"):
            model: PreTrainedModel = auto.from_config(config, attn_implementation=attention, dtype=dtype)
        return model

    try:
        return build("sdpa")
    except Exception as error:  # transformers' errors for a config have no common class
        if not isinstance(error, ValueError) or "scaled_dot_product_attention" not in str(error):
            raise
    return build("eager")


def _label_class(config: PretrainedConfig, head: LabelHeadSpec) -> Any:
    """Return the class that builds a model with a head of labels, and give the config the labels. Raises ModelError."""
    if head.embedding is not None:
        return _base_class(config)
    auto = AutoModelForSequenceClassification if head.pools else AutoModelForTokenClassification
    if auto._model_mapping.get(type(config), None) is None:
        raise ModelError(
            f"model.head={head.name} is not supported for this family: {SOURCE} has none for {config.model_type}; "
            "choose another family, for example qwen3 or llama"
        )
    config.num_labels = head.labels  # keeps the names of as many labels
    if head.names:
        own = list(config.id2label.values())
        if own != [*head.names] and {*own} == {*head.names}:
            raise ModelError(
                f"model.head has the names {', '.join(head.names)}, and the model's config the same in the order "
                f"{', '.join(own)}; give them in the order of the config"
            )
        config.id2label = dict(enumerate(head.names))
        config.label2id = {name: number for number, name in enumerate(head.names)}
    if head.pools and head.reward is None:
        config.problem_type = "single_label_classification" if head.classes else "regression"
    return auto


def _base_class(config: PretrainedConfig) -> Any:
    """Return the class that builds a model without a head. Raises ModelError if it is not a part of a decoder."""
    decoder, kind = decoder_of(config), AutoModel._model_mapping.get(type(config), None)
    if kind is None or (decoder is not None and type(decoder.base_model) is not kind):
        raise ModelError(
            f"model.head=embedding is not supported for model_type={config.model_type}, whose language model is not "
            "that of AutoModel with a head; choose another family, for example qwen3 or llama"
        )
    return AutoModel


def config_of(model: PreTrainedModel) -> PretrainedConfig:
    """Return the config of a model, which has one part: `check_kind` has refused all others."""
    return model.config


def base_of(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """Return the layers without a head, and the prefix of their names."""
    return model.base_model, f"{model.base_model_prefix}."


def token_head_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the linear map to logits of tokens."""
    head: nn.Module | None = model.get_output_embeddings()
    return head


def output_of(scores: Tensor) -> SequenceClassifierOutput:
    """Return scores in an output class of transformers, in which FSDP2 finds the tensor."""
    return SequenceClassifierOutput(logits=scores)


def decoder_of(config: PretrainedConfig) -> PreTrainedModel | None:
    """Return the causal language model with a config, on the meta device; None if its family has none."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    with torch.device("meta"):
        return None if kind is None else kind(copy.deepcopy(config))


def embeddings_of(model: PreTrainedModel) -> nn.Embedding:
    """Return the table of token vectors of a model."""
    table: nn.Embedding = model.get_input_embeddings()
    return table


def initialise_by(owner: PreTrainedModel, module: nn.Module) -> None:
    """Apply the rule of a model to one of its modules. It has no common error class."""
    owner._init_weights(module)


def tie(model: PreTrainedModel) -> None:
    """Tie the weights of a model as its config says."""
    model.tie_weights()


def stored_rules(model: PreTrainedModel, *, legacy: bool = True) -> list[Any]:
    """Return transformers' rules between a model's tensors and those in folders, also of older layouts."""
    rules: list[Any] = get_model_conversion_mapping(model, add_legacy=legacy)
    return rules


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
            f"audio; {_text_alone(config) or 'give a folder of a language model alone'}"
        )


def _text_alone(config: PretrainedConfig | None) -> str | None:
    """Return the advice to train the text part of a config; None if that is not a separate model."""
    kind = getattr(getattr(config, "text_config", None), "model_type", None)
    return f"train that part alone: model_type={kind}" if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else None


def sees_whole_rows(spec: ModelSpec) -> bool:
    """Return whether a model is an encoder: with a masked head, or with labels unless its config is a decoder's."""
    if spec.label_head is None:
        return spec.masked is not None
    config = model_config(spec)
    kind = config["model_type"]
    is_decoder = kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES or config.get("is_decoder") is True
    return not (kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and is_decoder)


def check_encoder_kind(config: PretrainedConfig, head: LabelHeadSpec | None) -> None:
    """Raise ModelError for a config of anything else than an encoder that sees whole rows; without `head` a masked one.

    Masked language models have a class of their own in transformers.
    """
    kind, what = config.model_type, "masked_lm needs an encoder" if head is None else f"{head.name} needs one model"
    is_masked = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if config.is_encoder_decoder or _has_parts(config) or (head is None and not is_masked):
        raise ModelError(
            f"model.head={what} of text alone, and model_type={kind} is none in {SOURCE}; choose one, for example "
            "modernbert or bert"
        )
    check_encoder(config)


def _has_parts(config: PretrainedConfig) -> bool:
    try:
        return config.get_text_config() is not config
    except ValueError:  # it has several
        return True


_DECODER = "a decoder with attention heads, for example qwen3 or llama"


def check_decoder(model: PreTrainedModel, *, another: str = _DECODER) -> None:
    """Raise ModelError for a model without the sizes of a decoder; `another` is the remedy."""
    # A model with a recurrent state may have no attention.
    needed = [name for name in NEEDED if name != "num_attention_heads" or not model._is_stateful]
    missing = [name for name in needed if not isinstance(getattr(model.config, name, None), int)]
    if missing:
        raise ModelError(
            f"{type(model).__name__} is not supported: its config has no {', '.join(missing)}; choose {another}"
        )


_ZERO_BIAS = ("Data2VecTextLMHead", "LongformerLMHead", "LukeLMHead", "EntityPredictionHead")
"""Heads whose bias only the constructor sets, to 0."""


def set_constants(module: nn.Module) -> None:
    """Set values that transformers sets only in a module's constructor: a build on meta loses them."""
    if isinstance(module, XIELUActivation):
        # Constructor defaults of its alphas, which no model changes; softplus inverts expm1().log().
        beta, eps = module._beta_scalar, module._eps_scalar
        for parameter, value in ((module.alpha_p, 0.8), (module.alpha_n, 0.8 - beta)):
            parameter.copy_(torch.tensor(value, dtype=parameter.dtype).expm1().log())
        module.beta.fill_(beta)
        module.eps.fill_(eps)
    elif isinstance(module, Conv1D) and module.weight.isnan().all():
        # GPT's rules, unlike GPT-2's, leave what the constructor drew.
        module.weight.normal_(std=0.02)
        module.bias.zero_()
    # Compared by name: an import of its family would slow down the start of every rank.
    elif type(module).__name__ in _ZERO_BIAS:
        module.get_parameter("bias").zero_()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the classes that transformers does not divide: the layers."""
    return modules_of(model, getattr(model, "_no_split_modules", None) or ())


def kernel_of(model: nn.Module) -> str | None:
    """Return the implementation of attention that a model uses."""
    found: str | None = getattr(config_of(model), "_attn_implementation", None)
    return found
