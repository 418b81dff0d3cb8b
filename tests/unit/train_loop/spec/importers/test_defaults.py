"""Fields that a file leaves out have the tool's own value: each tool answers for all of data, model and training."""

from typing import Any

import pytest

from tests.unit.train_loop.spec.importers.cases import imported
from train_loop.spec import DataSpec, ModelSpec, TrainingSpec
from train_loop.spec.importers.defaults import Derived, SpecDefault, ToolDefault
from train_loop.spec.importers.draft import default_of, has
from train_loop.spec.importers.recognise import Tool
from train_loop.spec.importers.registry import TOOLS

FIELDS = {
    f"{part}.{name}"
    for part, model in (("data", DataSpec), ("model", ModelSpec), ("training", TrainingSpec))
    for name in model.model_fields
}
LAUNCHERS = {"Accelerate", "DistributedConfig"}
"""Tools whose files say nothing of data, model and training."""
LEAST: dict[str, dict[str, Any]] = {
    "TrainingArguments": {"do_train": True},
    "TRL": {"use_peft": False},
    "TRL's reward": {"center_rewards_coefficient": None},
    "ROLL": {
        "sft_train": {"strategy_args": {"strategy_name": "fsdp2_train"}, "world_size": 1},
    },
    "axolotl": {"base_model": "a/b", "learning_rate": 1e-5, "val_set_size": 0, "datasets": [{"path": "c/d"}]},
    "LLaMA-Factory": {"model_name_or_path": "a/b", "do_train": True, "stage": "sft"},
    "torchtune": {
        "model": {"_component_": "torchtune.models.llama3.llama3_8b"},
        "checkpointer": {"checkpoint_dir": "/m"},
        "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
        "optimizer": {"_component_": "torch.optim.AdamW"},
        "batch_size": 2,
        "epochs": 1,
        "dtype": "bf16",
    },
}
"""The shortest file of each tool."""
IMPORTED = [tool for tool in TOOLS if tool.convert is not None and tool.name not in LAUNCHERS]


@pytest.mark.parametrize("tool", IMPORTED, ids=lambda tool: tool.name)
def test_tool_answers_for_every_field_of_data_model_and_training(tool: Tool) -> None:
    assert {field for field in FIELDS if field not in tool.defaults} == set()
    assert tool.defaults.keys() - FIELDS == set()


@pytest.mark.parametrize("tool", [tool for tool in IMPORTED if tool.name in LEAST], ids=lambda tool: tool.name)
def test_shortest_file_has_the_defaults_of_its_tool(tool: Tool) -> None:
    found = imported(LEAST[tool.name])
    for target, answer in tool.defaults.items():
        part, _, name = target.partition(".")
        value: Any = found.spec[part] if isinstance(found.spec[part], dict) else {}
        match answer:
            case ToolDefault(value=expected):
                assert value.get(name, default_of(target)) == expected, target
                rows = [row for row in found.rows if row.target == target]
                assert rows or (expected == default_of(target) and not answer.field), target
            case Derived():
                assert has(found.spec, target) or name == "momentum", target
            case SpecDefault(why=why):
                assert why, target


def test_default_of_a_tool_that_differs_is_written_with_its_reason() -> None:
    found = imported(LEAST["TrainingArguments"])
    (row,) = [row for row in found.rows if row.target == "data.packing"]
    assert row.written is False
    assert row.changes_numbers
    assert row.reason == "default of TrainingArguments, which pads each row; here the default is True"
