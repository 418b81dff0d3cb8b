"""Random weights follow the model's own rules, those of a parent for its children included."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.specs import TINY, spec
from train_loop.model.build import build_model, materialise

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": TINY,
    "llama": TINY | {"model_type": "llama", "attention_bias": True},
    # Attention and MLP make the output weights of their children smaller than the children themselves would.
    "gpt2": {"model_type": "gpt2", "vocab_size": 384, "n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 64}
    | {"bos_token_id": 0, "eos_token_id": 0},
}


@pytest.mark.parametrize("family", CONFIGS)
def test_weights_are_spread_as_transformers_spreads_them(family: str) -> None:
    config = spec(model={"config": CONFIGS[family]}).model
    model = build_model(config)
    materialise(model, build_model(config), seed=0, device=torch.device("cpu"))
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[family]))
    ours = dict(model.named_parameters())
    assert ours.keys() == dict(expected.named_parameters()).keys()
    for name, theirs in expected.named_parameters():
        # 512 draws and more: their standard deviations agree within about 1 / sqrt(512), and gpt2's rules differ by 4.
        assert ours[name].std().item() == pytest.approx(theirs.std().item(), rel=0.15), name
        assert ours[name].mean().item() == pytest.approx(theirs.mean().item(), abs=0.005), name
