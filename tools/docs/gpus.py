"""The tables of GPUs that fine-tuning of known models needs, computed by the plan."""

from collections.abc import Mapping
from typing import Any

from tools.docs.markdown import table
from train_loop.plan import device_named, fit_on, plan_job, read_shape
from train_loop.spec import JobSpec, override, parse

_GIB = 2**30
_QWEN = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
_LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3 0.6B": _QWEN | _sizes(1024, 3072, 28, 16) | {"tie_word_embeddings": True},
    "Qwen3 1.7B": _QWEN | _sizes(2048, 6144, 28, 16) | {"tie_word_embeddings": True},
    "Qwen3 4B": _QWEN | _sizes(2560, 9728, 36, 32) | {"tie_word_embeddings": True},
    "Qwen3 8B": _QWEN | _sizes(4096, 12288, 36, 32),
    "Qwen3 14B": _QWEN | _sizes(5120, 17408, 40, 40),
    "Qwen3 32B": _QWEN | _sizes(5120, 25600, 64, 64),
    "Llama 3.2 1B": _LLAMA | _sizes(2048, 8192, 16, 32) | {"tie_word_embeddings": True},
    "Llama 3.2 3B": _LLAMA | _sizes(3072, 8192, 28, 24) | {"tie_word_embeddings": True},
    "Llama 3.1 8B": _LLAMA | _sizes(4096, 14336, 32, 32),
    "Llama 3.1 70B": _LLAMA | _sizes(8192, 28672, 80, 64),
}
"""Sizes of published configs, by model."""
DEVICES = ("a10", "l40s", "a100-80g", "h200", "b200")
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128)
LORA: Mapping[str, Any] = {"lora": {"r": 16}, "master_dtype": "bf16"}
METHODS: dict[str, Mapping[str, Any]] = {
    "Full fine-tuning": {},
    "LoRA: `lora: {r: 16}` and `master_dtype: bf16`": {"model": LORA},
    "QLoRA: the same with `quantize_base: nf4`": {"model": {**LORA, "quantize_base": "nf4"}},
    "With `gradient_checkpointing: selective`, which is faster": {"model": {"gradient_checkpointing": "selective"}},
    "With `optimizer: adamw_8bit`": {"training": {"optimizer": "adamw_8bit"}},
}
"""Changes of a spec, by title."""
OFFLOADED: Mapping[str, Any] = {"strategy": {"offload_policy": True}}
LENGTH = 4096


def page() -> str:
    """Return the Markdown of the page."""
    intro = (
        "# Which GPU for which model\n\n"
        "The fewest GPUs on which a model [fits](../guides/planning.md#does-it-fit), by the plan: the estimate with a "
        "margin of a tenth, and 1.5 GiB for CUDA and NCCL. Runs compute in bf16 with AdamW, FSDP over all GPUs, "
        f"`gradient_checkpointing: full`, flex_attention, and one packed row of {LENGTH:,} tokens for each GPU. With "
        "[LoRA](../guides/lora.md), adapters of all linear layers are trained, in fp32; otherwise all weights, with "
        "fp32 master weights. In brackets are the planned GiB of a GPU. Not measured; `trainshed plan FILE --device "
        "NAME --suggest` computes the same for your spec."
    )
    return "\n\n".join([intro, *(_method(title, patch) for title, patch in METHODS.items()), _offloaded()])


def _method(title: str, patch: Mapping[str, Any]) -> str:
    names = [f"{device.title}, {device.memory / _GIB:g} GiB" for device in map(device_named, DEVICES)]
    rows = [(model, *(fewest(config, device, patch) for device in DEVICES)) for model, config in MODELS.items()]
    return f"## {title}\n\n" + table(("model", *names), rows).rstrip()


def _offloaded() -> str:
    """Return the bytes on one GPU and its host, which keeps the state."""
    rows = []
    for model, config in MODELS.items():
        plan = plan_job(job_of(config, 1, OFFLOADED), read_shape(dict(config)))
        rows.append((model, f"{plan.memory_bytes / _GIB:,.0f}", f"{plan.host_memory_bytes / _GIB:,.0f}"))
    title = "## With `offload_policy: true`, on one GPU\n\n"
    return title + table(("model", "GPU, GiB", "host, GiB, with a checkpoint's copy"), rows)


def fewest(config: Mapping[str, Any], device: str, patch: Mapping[str, Any]) -> str:
    """Return the fewest GPUs of a device on which a model fits, and in brackets the GiB of each."""
    for workers in WORKERS:
        job = job_of(config, workers, patch)
        plan = plan_job(job, read_shape(dict(config)).adapted(job.model))
        if fit_on(job, plan, device_named(device)).verdict == "fits":
            return f"{workers} ({plan.memory_bytes / _GIB:.0f})"
    return f"more than {WORKERS[-1]}"


def job_of(config: Mapping[str, Any], workers: int, patch: Mapping[str, Any]) -> JobSpec:
    """Return the job of a table, with the change of a method."""
    raw = {
        "name": "table",
        "model": {"config": dict(config), "attn_implementation": "flex_attention"},
        "data": {
            "train": {"path": "/data/rows.parquet"},
            "columns": {"input_ids": "ids"},
            "sequence_length": LENGTH,
        },
        "training": {"learning_rate": 1e-5},
        "scaling": {"num_workers": workers, "resources_per_worker": {"CPU": 8, "GPU": 1}},
    }
    return override(parse(raw), patch)
