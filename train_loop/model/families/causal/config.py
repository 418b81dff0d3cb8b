"""The config of a spec in its class of transformers."""

import difflib
from collections.abc import Iterable
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from train_loop.errors import ModelError
from train_loop.model.folder import model_config
from train_loop.spec import LabelHeadSpec, ModelSpec

SOURCE = f"transformers {transformers.__version__}"
_UNDECLARED = ("head_dim", "rope_theta", "rope_type", "partial_rotary_factor")
"""Fields that transformers reads although not every config class declares them."""
_OF_TOKEN_HEADS = ("classifier_dropout",)
"""Fields that heads of a label per token read, 0.1 without it."""


def read_config(spec: ModelSpec) -> Any:
    """Return the config of a spec's model, or of its folder. Raises ModelError."""
    return _hf_config(model_config(spec), spec.label_head) if spec.config is not None else _folder_config(spec)


def _hf_config(config: dict[str, Any], head: LabelHeadSpec | None) -> Any:
    """Return the config in its transformers class. Raises ModelError for a field that the class does not have.

    transformers itself keeps a misspelled field and trains with the default.
    """
    hf_config = _config_of_type(config)
    known = {*dir(type(hf_config)), *_UNDECLARED, *([] if head is None or head.pools else _OF_TOKEN_HEADS)}
    for name in sorted(config.keys() - known):
        remedy = f"set model.{name}" if name in ModelSpec.model_fields else _near(name, known) or "remove it"
        raise ModelError(f"{type(hf_config).__name__} has no field {name}; {remedy}")
    return hf_config


def _config_of_type(config: dict[str, Any]) -> Any:
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        remedy = _near(kind, CONFIG_MAPPING) or "choose a supported one, for example qwen3 or llama"
        raise ModelError(f"{SOURCE} does not support model_type={kind}; {remedy}")
    return AutoConfig.for_model(**config)


def _near(name: str, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else None


def _folder_config(spec: ModelSpec) -> Any:
    """Return the config of a folder.

    It may have any field, because transformers writes more fields than its classes declare.
    """
    config = model_config(spec)
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        kind = f" ({method})" if isinstance(method, str) else ""
        raise ModelError(f"{spec.path} holds quantised weights{kind}, which cannot be trained; give the original model")
    # Code that comes with a model is never run. Many folders contain code although transformers has the model too.
    if config.pop("auto_map", None) and config["model_type"] not in CONFIG_MAPPING:
        raise ModelError(
            f"{spec.path} needs custom code (auto_map), and the code in a model's folder is not run; choose a model "
            "that transformers supports"
        )
    return _config_of_type(config)
