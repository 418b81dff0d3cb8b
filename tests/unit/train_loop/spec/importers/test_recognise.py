"""Recognition of tools: by fields that no other tool has; files of other tools are refused by name."""

import json
from itertools import permutations
from typing import Any

import pytest

from tests.unit.train_loop.spec.importers.cases import imported
from train_loop.spec import SpecError
from train_loop.spec.importers.recognise import Tool
from train_loop.spec.importers.registry import TOOLS

FILES: dict[str, str] = {
    "DeepSpeed": """
{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
 "bf16": {"enabled": true}, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
""",
    "verl": """
data: {train_batch_size: 256, micro_batch_size_per_gpu: 4, train_files: ~/data/gsm8k/train.parquet, max_length: 1024}
model: {partial_pretrain: Qwen/Qwen2.5-0.5B, lora_rank: 0}
optim: {lr: 1e-5, weight_decay: 0.01}
trainer: {default_local_dir: /tmp/sft, project_name: gsm8k-sft, total_epochs: 4}
""",
    "torchtitan": """
# torchtitan Config.toml
[job]
dump_folder = "./outputs"

[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 1
seq_len = 8192
""",
    "SkyPilot": """
name: train
resources: {accelerators: "A100:8"}
num_nodes: 2
workdir: .
setup: pip install -r requirements.txt
run: torchrun --nproc_per_node 8 train.py
""",
    "Lightning": """
seed_everything: 42
trainer: {accelerator: gpu, devices: 8, max_epochs: 3, strategy: fsdp}
model: {class_path: my.Model}
data: {class_path: my.Data}
""",
    "NeMo": """
name: megatron_gpt_sft
trainer: {devices: 8, accelerator: gpu, num_nodes: 1, max_steps: 100}
exp_manager: {name: sft}
model: {micro_batch_size: 1, global_batch_size: 128, tensor_model_parallel_size: 2, restore_from_path: /m.nemo}
""",
    "Megatron": """
tensor-model-parallel-size: 2
pipeline-model-parallel-size: 2
micro-batch-size: 2
global-batch-size: 256
train-iters: 1000
lr: 1.0e-4
""",
    "a model (config.json)": json.dumps(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 9}
    ),
    "peft's adapters (adapter_config.json)": json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}),
    "TRL's DPO, KTO, GRPO, RLOO or distillation": json.dumps(
        {"per_device_train_batch_size": 2, "beta": 0.1, "max_length": 1024, "precompute_ref_log_probs": False}
    ),
}
"""Configurations as the tools' own examples have them."""


def problem(text: str | dict[str, Any]) -> str:
    """Return the message of the only problem of a file that is not imported."""
    with pytest.raises(SpecError) as caught:
        imported(text)
    (found,) = caught.value.problems
    return found.message


@pytest.mark.parametrize("name", FILES)
def test_file_of_a_tool_without_an_importer_is_refused_by_its_name(name: str) -> None:
    message = problem(FILES[name])
    assert message.startswith(f"the file is a configuration of {name} (")
    assert "which is not imported; " in message


def test_refused_file_has_the_place_of_its_mark() -> None:
    with pytest.raises(SpecError) as caught:
        imported(FILES["Megatron"])
    assert (caught.value.problems[0].line, caught.value.problems[0].pointer) == (2, "/tensor-model-parallel-size")


@pytest.mark.parametrize(
    ("given", "format_name"),
    [
        ({"per_device_train_batch_size": 8, "learning_rate": 1e-5}, "TrainingArguments"),
        ({"use_peft": True, "learning_rate": 1e-5, "lora_r": 8}, "TRL"),
        ({"per_device_train_batch_size": 8, "assistant_only_loss": True, "packing": True}, "TRL"),
        ({"fsdp_size": 2, "tp_size": 2}, "DistributedConfig"),
        ({"distributed_type": "FSDP", "num_processes": 2}, "Accelerate"),
    ],
)
def test_file_is_that_of_the_tool_whose_fields_no_other_has(given: dict[str, Any], format_name: str) -> None:
    assert imported(given).formats == (format_name,)


def test_file_with_fields_of_two_tools_is_refused_by_both_names() -> None:
    assert problem({"per_device_train_batch_size": 8, "adapter": "lora", "sequence_len": 2048}) == (
        "the file has fields of TrainingArguments (per_device_train_batch_size) and of axolotl (adapter, "
        "sequence_len), and a file is read as that of one tool; remove the others' fields"
    )
    both = problem({"finetuning_type": "lora", "use_peft": True})
    assert both.startswith("the file has fields of TRL (use_peft) and of LLaMA-Factory (finetuning_type)")


@pytest.mark.parametrize(
    "given",
    [
        {"output_dir": "x", "learning_rate": 1e-5},
        {"output_dir": "x", "gradient_accumulation_steps": 2, "seed": 1},
        {"model_name_or_path": "a/b", "dataset_name": "c", "learning_rate": 1e-5},
        {"mixed_precision": "bf16", "num_processes": 2},
        {"bf16": True, "max_steps": 10},
    ],
)
def test_file_with_fields_of_several_tools_only_is_answered_with_what_is_missing(given: dict[str, Any]) -> None:
    message = problem(given)
    assert message.startswith(f"unknown format; {', '.join(sorted(given))} may be of ")
    assert "; add a field that only one of them has, such as " in message


def test_field_of_a_tool_that_extends_another_is_answered_with_its_name() -> None:
    assert problem({"per_device_train_batch_size": 8, "model_name_or_path": "a/b"}) == (
        "model_name_or_path may be of TRL or LLaMA-Factory; add a field that only one of them has, such as "
        "dataset_text_field (TRL) or finetuning_type (LLaMA-Factory), or remove it from a file of TrainingArguments"
    )


@pytest.mark.parametrize(
    "text",
    ["[owner]\nname = 'x'\n", "title = 'x'\n[a]\nb = 1\n", "# comment\n\n[a.b]\nc = [1,\n", "a = 1\nb = 2"],
)
def test_toml_of_no_known_tool_is_refused_as_toml(text: str) -> None:
    assert problem(text) == "the file is TOML, and configurations are read as YAML or JSON; convert it"


@pytest.mark.parametrize("text", ["output_dir: [\n", "{'a': 1", "just text", "[1, 2]", "a == b"])
def test_other_text_is_not_called_toml(text: str) -> None:
    assert "TOML" not in problem(text)


def extends(tool: Tool, other: Tool) -> bool:
    return tool.extends == other.name or any(
        one.name == tool.extends and extends(one, other) for one in TOOLS if one is not tool
    )


def test_marks_of_a_tool_are_fields_of_no_other() -> None:
    for tool, other in permutations(TOOLS, 2):
        if not extends(other, tool):
            common = set(tool.marks) & {*other.marks, *other.shared, *other.alone}
            assert common == set(), (tool.name, other.name)
