"""Imports plan: ROLL's public examples with small models of their families, and random files of other tools."""

import os
import random
from types import ModuleType
from typing import Any

import pytest

from tests.support.builders.searches import seeds
from tests.support.builders.specs import TINY, may_read
from tests.support.families.families import small
from tests.unit.train_loop.spec.importers.cases import documents, imported
from tests.unit.train_loop.spec.importers.tools import axolotl, llama_factory, torchtune
from train_loop.plan import plan_job
from train_loop.preflight.model import check_model
from train_loop.spec import parse

FILES = documents("roll.yaml")
WIDE = TINY | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
"""Sizes that four-bit weights can have."""
MESHES = {
    "examples/qwen2.5-7B-rlvr_megatron/rlvr_fsdp2_sp2.yaml": {"ddp": 2, "fsdp": 4, "sp": 2},
    "examples/qwen3-30BA3B-rlvr_fsdp2/rlvr_config_ep.yaml": {"fsdp": 32, "sp": 4, "efsdp": 4, "ep": 8},
    "examples/qwen3-30BA3B-agentic_fsdp2/agentic_val_sokoban_30a3.yaml": {"ddp": 2, "fsdp": 16, "sp": 2},
    "examples/qwen3.5-35BA3-sft_fsdp2/sft_config_ep.yaml": {"fsdp": 8, "sp": 1, "efsdp": 1, "ep": 8},
}


def config_of(name: str) -> dict[str, Any]:
    """Return a small model with the layers and experts that an example names, and heads that Ulysses can share."""
    if "qwen3.5" in name:
        return small("qwen3_5_moe_text") | {"num_experts": 8}
    if "30" in name:
        return small("qwen3_moe") | {"num_experts": 8}
    kind = "qwen2" if "example_ppo" in name else "qwen3"
    return {key: value for key, value in TINY.items() if kind == "qwen3" or key != "head_dim"} | {"model_type": kind}


@pytest.mark.parametrize("name", [name for name in FILES if "MORE" in os.environ or name in MESHES])
def test_import_plans_once_its_paths_are_given(name: str) -> None:
    raw: Any = imported(FILES[name]).spec
    # Flash kernels are not installed everywhere.
    unused = ("path", "attn_implementation")
    raw["model"] = {key: one for key, one in raw["model"].items() if key not in unused} | {"config": config_of(name)}
    raw["data"] |= {"train": {"path": "stdlib://*.py"}, "columns": {"text": "text"}}
    if "eval" in raw["data"]:
        raw["data"]["eval"] = {"path": "stdlib://json/*.py"}
    job = parse(raw)
    shape, problems = check_model(job, may_read("/"))
    assert problems == []
    assert shape is not None
    axes = plan_job(job, shape).mesh.axes
    assert MESHES.get(name, axes) == axes


@pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
@pytest.mark.parametrize("tool", [axolotl, llama_factory, torchtune], ids=lambda tool: tool.__name__.rpartition(".")[2])
def test_random_file_of_a_tool_plans_once_its_paths_are_given(tool: ModuleType) -> None:
    for seed in range(seeds(5, more=100)):
        raw: Any = imported(tool.draw(random.Random(seed))).spec
        raw["model"] = {key: one for key, one in raw["model"].items() if key != "path"} | {"config": WIDE}
        raw["data"] |= {"train": {"path": "stdlib://*.py"}, "columns": {"text": "text"}}
        job = parse(raw)
        shape, problems = check_model(job, may_read("/"))
        assert problems == [], seed
        assert shape is not None
        assert plan_job(job, shape).mesh.axes
