"""The adapters of peft, as axolotl and LLaMA-Factory build them."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.builders.specs import TINY


def adapted_by_peft(**settings: Any) -> tuple[frozenset[str], frozenset[str], float]:
    """Return the modules with adapters, those that are trained whole, and the factor of the adapters."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
        if settings["target_modules"] == "every linear layer":
            # Both tools collect the last names of all linear layers but the head's.
            names = [name for name, one in model.named_modules() if isinstance(one, nn.Linear)]
            settings["target_modules"] = sorted({name.rpartition(".")[2] for name in names} - {"lm_head"})
        adapted: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    start = "base_model.model."
    layers = {name.removeprefix(start): one for name, one in adapted.named_modules() if isinstance(one, LoraLayer)}
    saved = {name.removeprefix(start) for name, one in adapted.named_modules() if isinstance(one, ModulesToSaveWrapper)}
    scale = float(next(iter(layers.values())).scaling["default"])
    return frozenset(layers), frozenset(saved), scale
