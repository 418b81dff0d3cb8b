"""Import of torchtune's recipes: published shapes, defaults of components, and refusals."""

from typing import Any

import pytest

from tests.unit.train_loop.spec.importers.cases import imported, job, marked, unreported
from train_loop.spec import LoraSpec, SpecError
from train_loop.spec.importers import Outcome
from train_loop.spec.importers.references import resolve

COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
FULL: dict[str, Any] = {
    "output_dir": "/tmp/torchtune/full",
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "/tmp/m/tokenizer.model",
                  "max_seq_len": None},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "packed": False},
    "seed": None,
    "shuffle": True,
    "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"},
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "/tmp/m/",
                     "checkpoint_files": ["model.safetensors"], "recipe_checkpoint": None,
                     "output_dir": "${output_dir}", "model_type": "LLAMA3_2"},
    "resume_from_checkpoint": False,
    "batch_size": 4,
    "epochs": 1,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": "2e-5", "fused": True},
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "max_steps_per_epoch": None,
    "gradient_accumulation_steps": 8,
    "device": "cuda",
    "enable_activation_checkpointing": False,
    "enable_activation_offloading": False,
    "clip_grad_norm": None,
    "compile": False,
    "optimizer_in_bwd": False,
    "dtype": "bf16",
    "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "${output_dir}/logs"},
    "log_every_n_steps": 1,
    "log_peak_memory_stats": True,
    "profiler": {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False, "cpu": True,
                 "output_dir": "${output_dir}/profiling_outputs", "wait_steps": 5},
}  # fmt: skip
"""The shape of torchtune's recipes."""
LORA = {"_component_": "torchtune.models.llama3_2.lora_llama3_2_1b", "lora_attn_modules": ["q_proj", "output_proj"],
        "apply_lora_to_mlp": True, "lora_rank": 64, "lora_alpha": 128, "lora_dropout": 0.0}  # fmt: skip


def test_published_shape_of_a_full_fine_tune_becomes_its_run() -> None:
    found = imported(FULL)
    spec, training = job(found), job(found).training
    assert spec.model.lora is None
    assert (spec.model.path, spec.model.dtype, spec.model.master_dtype) == ("/tmp/m/", "bf16", "bf16")
    assert (spec.strategy.reduce_dtype, spec.model.gradient_checkpointing) == ("bf16", "none")
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (4, 8)
    assert (training.learning_rate, training.weight_decay, training.optimizer) == (2e-5, 0.01, "adamw")
    assert (training.lr_scheduler_type, training.warmup_steps, training.max_grad_norm) == ("constant", 0, None)
    assert (training.num_train_epochs, training.max_steps, spec.checkpoint.every_steps) == (1, None, None)
    assert (spec.data.packing, spec.data.on_long_rows, spec.data.columns.text) == (False, "fail", "text")
    assert {row.target for row in found.needed} == {
        "data.train.path", "data.columns", "data.sequence_length", "scaling.num_workers",
    }  # fmt: skip
    assert unreported(found, resolve(dict(FULL))) == set()
    assert [row.field for row in found.rows if row.outcome is Outcome.UNKNOWN] == []


def test_published_shape_of_adapters_has_names_of_transformers() -> None:
    scheduler = {"_component_": COSINE, "num_warmup_steps": 100}
    found = imported(FULL | {"model": LORA, "lr_scheduler": scheduler})
    spec = job(found)
    assert spec.model.lora == LoraSpec(
        r=64, alpha=128, target_modules=("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    )
    assert (spec.training.lr_scheduler_type, spec.training.warmup_steps) == ("cosine", 100)
    quantised = LORA | {"_component_": "torchtune.models.llama3_2.qlora_llama3_2_1b"}
    assert job(imported(FULL | {"model": quantised})).model.quantize_base == "nf4"
    assert job(imported(FULL | {"model": LORA | {"quantize_base": True}})).model.quantize_base == "nf4"


def test_adapters_of_joined_matrices_are_marked() -> None:
    model = LORA | {"_component_": "torchtune.models.phi3.lora_phi3_mini"}
    found = imported(FULL | {"model": model})
    lora = job(found).model.lora
    assert lora is not None
    assert lora.target_modules == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    assert "model.lora_attn_modules" in marked(found)


@pytest.mark.parametrize(
    ("given", "path", "expected"),
    [
        ({"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1}}, "training.momentum", 0.0),
        ({"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}}, "training.momentum", 0.9),
        ({"optimizer": {"_component_": "torch.optim.Adam", "lr": 0.1}}, "training.weight_decay", 0.0),
        ({"optimizer": {"_component_": "torch.optim.AdamW"}}, "training.learning_rate", 1e-3),
        ({"optimizer": {"_component_": "torch.optim.AdamW", "betas": [0.9, 0.95]}}, "training.adam_beta2", 0.95),
        ({"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"}}, "training.optimizer", "adamw_8bit"),
        ({"clip_grad_norm": 1.0}, "training.max_grad_norm", 1.0),
        ({"clip_grad_norm": "inf"}, "training.max_grad_norm", None),
        ({"epochs": 2, "max_steps_per_epoch": 50}, "training.max_steps", 100),
        ({"epochs": 2, "max_steps_per_epoch": 50}, "checkpoint.every_steps", 50),
        ({"dtype": "fp32"}, "model.master_dtype", "fp32"),
        ({"enable_activation_checkpointing": True}, "model.gradient_checkpointing", "full"),
        (
            {"enable_activation_checkpointing": True, "enable_activation_offloading": True},
            "model.gradient_checkpointing",
            "offload",
        ),
        ({"ac_mode": "selective", "ac_option": "op"}, "model.gradient_checkpointing", "selective"),
        ({"fsdp_cpu_offload": True}, "strategy.offload_policy", True),
        ({"tensor_parallel_dim": 2}, "strategy.tp_size", 2),
        ({"compile": True}, "model.compile", True),
        ({"seed": 7}, "training.seed", 7),
        ({"device": "cpu"}, "scaling.resources_per_worker", {"CPU": 1.0}),
        ({"tokenizer": {"_component_": "x", "max_seq_len": 512}}, "data.sequence_length", 512),
        ({"tokenizer": {"_component_": "x", "max_seq_len": 512}}, "data.on_long_rows", "truncate"),
        (
            {
                "dataset": {
                    "_component_": "torchtune.datasets.text_completion_dataset",
                    "source": "json",
                    "packed": True,
                    "data_files": "/data/a.json",
                    "column": "body",
                }
            },
            "data.columns.text",
            "body",
        ),
        (
            {
                "dataset": {
                    "_component_": "torchtune.datasets.chat_dataset",
                    "source": "a/b",
                    "conversation_column": "chat",
                    "conversation_style": "openai",
                }
            },
            "data.columns.messages",
            "chat",
        ),
        (
            {"dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "train_on_input": False}},
            "data.columns.messages",
            "messages",
        ),
        (
            {"dataset_val": {"_component_": "torchtune.datasets.alpaca_dataset"}, "run_val_every_n_steps": 20},
            "training.eval_steps",
            20,
        ),
    ],
)
def test_field_becomes_its_value(given: dict[str, Any], path: str, expected: Any) -> None:
    value: Any = job(imported(FULL | given))
    for name in path.split("."):
        value = getattr(value, name)
    assert value == expected


def test_recomputation_of_every_second_layer_keeps_its_number() -> None:
    spec: Any = imported(FULL | {"ac_mode": "selective", "ac_option": 2}).spec
    assert spec["model"]["gradient_checkpointing"] == {"every": 2}


_REMEDY = "import a recipe of full_finetune or lora_finetune, or write a spec, starting from trainshed init"
_END = f"which is not supported; {_REMEDY}"


@pytest.mark.parametrize(
    ("given", "pointer", "message"),
    [
        (
            {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}},
            "/loss/_component_",
            f"the recipe is torchtune.rlhf.loss.DPOLoss (training on preferences), {_END}",
        ),
        (
            {"teacher_model": {"_component_": "torchtune.models.llama3.llama3_8b"}},
            "/teacher_model",
            f"the recipe is knowledge distillation, {_END}",
        ),
        (
            {"quantizer": {"_component_": "torchtune.training.quantization.Q", "groupsize": 256}},
            "/quantizer/_component_",
            f"the recipe is quantisation-aware training, {_END}",
        ),
        (
            {"model": {"_component_": "torchtune.models.llama3_2_vision.llama3_2_vision_11b"}},
            "/model/_component_",
            f"the recipe is torchtune.models.llama3_2_vision.llama3_2_vision_11b (images), {_END}",
        ),
        ({"optimizer": None}, "", f"the recipe trains nothing: it has no optimizer; {_REMEDY}"),
        (
            {"optimizer": {"_component_": "my.Shampoo"}},
            "/optimizer/_component_",
            "the optimizer Shampoo does not exist here; choose torch.optim.AdamW, Adam or SGD",
        ),
        (
            {"lr_scheduler": {"_component_": "my.rex"}},
            "/lr_scheduler/_component_",
            "the schedule rex does not exist here; choose get_cosine_schedule_with_warmup, or none",
        ),
        ({"dtype": "fp16"}, "/dtype", "torchtune does not train in fp16; write bf16 or fp32"),
        ({"batch_size": None}, "", "torchtune needs batch_size, and the file has none; add it"),
        (
            {"model": LORA | {"lora_attn_modules": ["wq"]}},
            "/model/lora_attn_modules",
            "invalid lora_attn_modules; expected a list of q_proj, k_proj, v_proj, output_proj",
        ),
        (
            {"model": {"_component_": "torchtune.models.llama3.llama3_8b", "lora_rank": 8}},
            "/model/lora_rank",
            "the builder llama3_8b trains all weights, and lora_rank is of one whose name starts with lora_; "
            "change one of the two",
        ),
        (
            {"dataset": [{"_component_": "torchtune.datasets.alpaca_dataset"}]},
            "/dataset",
            "a list of datasets is not imported; write one, and list the others in data.train of the spec",
        ),
    ],
)
def test_recipe_that_no_job_is_equal_to_is_refused_by_name(given: dict[str, Any], pointer: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        imported(FULL | given)
    (found,) = caught.value.problems
    assert (found.pointer, found.message) == (pointer, message)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"model": LORA | {"apply_lora_to_output": True}}, "model.apply_lora_to_output"),
        ({"resume_from_checkpoint": True}, "resume_from_checkpoint"),
        ({"epochs": 2, "max_steps_per_epoch": 50}, "max_steps_per_epoch"),
        ({"optimizer": {"_component_": "torch.optim.AdamW", "amsgrad": True}}, "optimizer.amsgrad"),
        ({"dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "split": "train[:10%]"}}, "dataset.split"),
        ({"early_exit": {"scale": 1.0}}, "early_exit.scale"),
    ],
)
def test_field_that_changes_numbers_is_marked(given: dict[str, Any], field: str) -> None:
    assert field in marked(imported(FULL | given))
