"""Kinds of models that this loop does not train, each with its reason."""

import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from train_loop.errors import ModelError
from train_loop.model.config_faults import has_experts
from train_loop.plan import NEEDED


def check_kind(config: PretrainedConfig) -> None:
    """Raise ModelError for a config of anything else than a language model alone."""
    kind = config.model_type
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"transformers {transformers.__version__} has no causal language model for model_type={kind}; choose a "
            "decoder of text, for example qwen3 or llama"
        )
    if _has_parts(config):
        raise ModelError(
            f"not supported: model_type={kind} has a language model as one of its parts, beside others such as vision "
            "or audio; give a folder of a language model alone"
        )
    if getattr(config, "add_cross_attention", False):
        raise ModelError(
            "add_cross_attention: true needs the output of an encoder, which a causal language model does not have; "
            "set it to false"
        )


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
    if kind is not None and has_experts(kind, config):
        raise ModelError(f"not supported yet: mixture of experts ({kind.__name__}); choose a dense model")


def check_attends(model: PreTrainedModel) -> None:
    """Raise ModelError for a model that has a recurrent state and no attention."""
    if model._is_stateful and getattr(model.config, "num_key_value_heads", None) is None:
        raise ModelError(
            f"not supported yet: recurrent models without attention, such as {type(model).__name__}; choose a model "
            "with attention"
        )


def check_decoder(model: PreTrainedModel) -> None:
    """Raise ModelError for a model that has no sizes of a dense decoder with attention."""
    check_dense(model)
    check_attends(model)
    _check_sizes(model)


def _check_sizes(model: PreTrainedModel) -> None:
    missing = [name for name in NEEDED if not isinstance(getattr(model.config, name, None), int)]
    if missing:
        raise ModelError(
            f"{type(model).__name__} is not supported: its config has no {', '.join(missing)}; choose a decoder with "
            "attention heads, for example qwen3 or llama"
        )


def check_rows(model: PreTrainedModel, vocab: int) -> None:
    """Raise ModelError if the embeddings have fewer rows than the vocabulary of the config has tokens."""
    head = model.get_output_embeddings()
    rows = min(len(model.get_input_embeddings().weight), len(head.weight) if head is not None else vocab)
    if rows < vocab:
        raise ModelError(
            f"{type(model).__name__} has embeddings for {rows} tokens, and its config says vocab_size={vocab}; correct "
            "the vocabulary sizes of the config"
        )


def check_layers(model: PreTrainedModel) -> None:
    """Raise ModelError for layer types in which this loop does not keep documents apart."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    strange = sorted(kinds - {"full_attention", "sliding_attention"})
    if strange:
        check_dense(model)
        raise ModelError(
            f"{model.config.model_type} has layers of unsupported type {', '.join(strange)}; choose a model "
            "whose layers all have full or sliding attention"
        )
