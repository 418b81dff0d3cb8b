"""Folders with adapters as peft writes them, and what peft itself computes with them."""

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "base",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "r": 2,
    "rank_pattern": {},
    "target_modules": ["q_proj"],
    "use_dora": False,
    "use_rslora": False,
}
"""Some fields of an adapter_config.json."""
_A_TENSOR = {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(1)}


def write_parts(folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """Write a folder with given tensors, by the model's names, and with fields of its config overridden."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    named = {f"base_model.model.{name}": value for name, value in (tensors or _A_TENSOR).items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def write_adapters(base: Path, folder: Path, **config: Any) -> Path:
    """Write a folder with trained-like adapters for a model, by peft."""
    model = _quiet(peft.get_peft_model, plain_model(base), peft.LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 8)
    _quiet(model.save_pretrained, folder)
    return folder


def peft_logits(base: Path, folder: Path, rows: list[list[int]]) -> list[Tensor]:
    """Return the logits [length, vocabulary] of each row by peft's own loading and forward, in fp32."""
    model = _quiet(peft.PeftModel.from_pretrained, plain_model(base), folder).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]


def plain_model(base: Path) -> Any:
    """Return a folder's model in fp32, without adapters."""
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def _quiet(call: Any, *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft reads a deprecated property
        return call(*arguments)
