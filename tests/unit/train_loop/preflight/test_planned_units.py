"""FSDP units of a plan equal the units of the loop, by class, with their parameters."""

from typing import Any

import pytest
import torch.distributed as dist

from tests.support.builders.specs import TINY, may_read, raw_spec
from train_loop.plan import UnitGroup, UnitTree
from train_loop.preflight.model import check_model
from train_loop.spec import parse

NORMS = 2 * 32 + 2 * 8
LAYER = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48 + NORMS
TABLE = 384 * 32


def built(**parts: dict[str, Any]) -> UnitTree:
    shape, problems = check_model(parse(raw_spec(**parts)), may_read())
    assert problems == []
    assert shape is not None
    assert shape.built is not None
    assert not dist.is_initialized()
    return shape.built


def test_units_of_a_decoder_are_its_layers_embeddings_head_and_the_rest() -> None:
    found = built()
    assert {*found.units} == {
        UnitGroup("Qwen3ForCausalLM", 1, 32, 4 * 32, "fp32"),
        UnitGroup("Embedding", 1, TABLE, 4 * TABLE, "fp32"),
        UnitGroup("Qwen3DecoderLayer", 2, LAYER, 4 * LAYER, "fp32"),
        UnitGroup("Linear", 1, TABLE, 4 * TABLE, "fp32"),
    }
    lines = found.tree.splitlines()
    assert lines[0] == "FSDPQwen3ForCausalLM("
    assert "      (0-1): 2 x FSDPQwen3DecoderLayer(" in lines
    assert "    (embed_tokens): FSDPEmbedding(384, 32)" in lines


def test_units_have_the_dtype_in_which_they_compute() -> None:
    found = built(model={"dtype": "bf16"}, strategy={"norm_dtype": "fp32"})
    kinds = {(one.module, one.dtype): one for one in found.units}
    assert kinds["Qwen3DecoderLayer", "bf16"].bytes == 2 * (LAYER - NORMS)
    norms = {one.parameters: one.count for one in found.units if (one.module, one.dtype) == ("Qwen3RMSNorm", "fp32")}
    assert norms == {32: 2 * 2 + 1, 8: 2 * 2}


def test_embeddings_and_head_are_in_the_root_unit_if_the_policy_says_so() -> None:
    found = built(strategy={"wrap_policy": {"wrap_embeddings": False, "wrap_lm_output": False}})
    assert {one.module: (one.count, one.parameters) for one in found.units} == {
        "Qwen3ForCausalLM": (1, 2 * TABLE + 32),
        "Qwen3DecoderLayer": (2, LAYER),
    }


@pytest.mark.parametrize("policy", [{"wrap_embeddings": True}, {"min_num_params": 100}])
def test_tied_embeddings_count_once(policy: dict[str, Any]) -> None:
    found = built(model={"config": TINY | {"tie_word_embeddings": True}}, strategy={"wrap_policy": policy})
    assert sum(one.count * one.parameters for one in found.units) == TABLE + 32 + 2 * LAYER


def test_experts_that_workers_share_are_units() -> None:
    config = TINY | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    parts: dict[str, dict[str, Any]] = {"model": {"config": config}, "scaling": {"num_workers": 4}}
    alone, shared = ({one.module: one.count for one in built(**parts, strategy={"ep_size": ep}).units} for ep in (1, 2))
    assert "Qwen3MoeExperts" not in alone
    assert shared["Qwen3MoeExperts"] == 2
