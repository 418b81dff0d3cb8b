"""Random weights: the model's own rules, including a parent's rules for its children."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.builders.specs import TINY, spec
from train_loop.errors import ModelError
from train_loop.model.build import check_rules, materialise
from train_loop.model.families.causal.build import build_model
from train_loop.model.families.causal.family import CAUSAL

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": TINY,
    "llama": TINY | {"model_type": "llama", "attention_bias": True},
    # Attention and MLP initialise the output weights of their children smaller than the children's own rules.
    "gpt2": {"model_type": "gpt2", "vocab_size": 384, "n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 64}
    | {"bos_token_id": 0, "eos_token_id": 0},
}
APERTUS = TINY | {"model_type": "apertus", "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", CONFIGS)
def test_weight_spread_equals_that_of_transformers(family: str) -> None:
    config = spec(model={"config": CONFIGS[family]}).model
    model = build_model(config)
    materialise(model, CAUSAL.build(config), seed=0, device=torch.device("cpu"))
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[family]))
    ours = dict(model.named_parameters())
    assert ours.keys() == dict(expected.named_parameters()).keys()
    for name, theirs in expected.named_parameters():
        # From 512 draws, standard deviations agree within about 1 / sqrt(512); gpt2's rules differ by a factor of 4.
        assert ours[name].std().item() == pytest.approx(theirs.std().item(), rel=0.15), name
        assert ours[name].mean().item() == pytest.approx(theirs.mean().item(), abs=0.005), name


def test_xielu_gets_its_constructor_values() -> None:
    config = spec(model={"config": APERTUS}).model
    model = build_model(config)
    materialise(model, CAUSAL.build(config), seed=0, device=CPU)
    expected = AutoModelForCausalLM.from_config(AutoConfig.for_model(**APERTUS)).model.layers[1].mlp.act_fn
    ours = model.model.layers[1].mlp.act_fn
    for name, value in (*expected.named_parameters(), *expected.named_buffers()):
        assert getattr(ours, name).tolist() == value.tolist(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_buffer_without_a_rule_is_rejected_by_name(dtype: torch.dtype) -> None:
    config = spec(model={"config": TINY}).model
    model, blueprint = build_model(config), build_model(config)
    for built in (model, blueprint):
        built.model.layers[1].register_buffer("forgotten", torch.zeros(2, dtype=dtype, device="meta"))
    with pytest.raises(ModelError, match=r"does not initialise model\.layers\.1\.forgotten \(Qwen3DecoderLayer\)"):
        materialise(model, CAUSAL.anatomy(blueprint), seed=0, device=CPU)


def test_parameter_without_a_rule_is_rejected_by_name() -> None:
    config = spec(model={"config": TINY}).model
    model, blueprint = build_model(config), build_model(config)
    for built in (model, blueprint):
        built.model.layers[1].forgotten = torch.nn.Parameter(torch.zeros(2, device="meta"))
    with pytest.raises(ModelError, match=r"does not initialise model\.layers\.1\.forgotten"):
        materialise(model, CAUSAL.anatomy(blueprint), seed=0, device=CPU)


def test_missing_rules_are_found_on_meta_unless_a_folder_holds_the_tensor() -> None:
    model = build_model(spec(model={"config": TINY}).model)
    check_rules(CAUSAL.anatomy(model))
    model.model.layers[1].forgotten = torch.nn.Parameter(torch.zeros(2, device="meta"))
    with pytest.raises(ModelError, match=r"does not initialise model\.layers\.1\.forgotten"):
        check_rules(CAUSAL.anatomy(model))
    check_rules(CAUSAL.anatomy(model), stored=["model.layers.1.forgotten"])
    assert model.model.layers[1].forgotten.device.type == "meta"
