"""Precision, memory, kernels and processes of axolotl's configurations."""

from collections.abc import Mapping
from typing import Any

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.axolotl.fields import ATTENTION
from train_loop.spec.importers.axolotl.refused import OFF
from train_loop.spec.importers.draft import Draft, pointer_of
from train_loop.spec.importers.hugging_face.fsdp import read_fsdp, sharding_name, write_sharding
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import attention, flag, number

_KERNELS = {
    "kernels-community/flash-attn2": "flash_attention_2",
    "kernels-community/flash-attn3": "flash_attention_3",
    "kernels-community/vllm-flash-attn3": "flash_attention_3",
    "flash_attention_4": "flash_attention_3",
    "flash_attention_torch": "sdpa",
    "eager": "sdpa",
    "xformers": "sdpa",
}
"""The spec's name of kernels with the same numbers."""


def read_precision(draft: Draft, *, trains_adapters: bool) -> None:
    """Translate the compute dtype, which is also that of the weights unless FSDP or DeepSpeed keeps fp32 ones."""
    bf16, fp16 = draft.get("bf16", "auto"), flag(draft.get("fp16", False))
    if flag(draft.get("bfloat16", False)) or (bf16 not in OFF and not (fp16 and bf16 == "auto")):
        chosen, field = "bf16", "bfloat16" if flag(draft.get("bfloat16", False)) else "bf16"
    elif fp16 or flag(draft.get("float16", False)):
        chosen, field = "fp16", "fp16" if fp16 else "float16"
    else:
        chosen, field = "fp32", "bf16"
    if draft.has(field):
        reason = "auto: bf16 on GPUs that have it" if bf16 == "auto" and chosen == "bf16" else ""
        draft.write(field, "model.dtype", chosen, reason=reason)
    else:
        draft.assume(field, "model.dtype", chosen, tool="axolotl, on GPUs that have it")
    for name in ("bf16", "fp16", "bfloat16", "float16", "float32"):
        if name != field:
            draft.leave(name, f"{field} decides")
    sharded = any(draft.get(name) not in OFF for name in ("fsdp", "fsdp_config", "deepspeed"))
    if chosen == "bf16" and not trains_adapters and not sharded:
        draft.differ(
            "without FSDP and DeepSpeed, axolotl keeps weights and optimizer states in bf16; fp32 is more exact, and "
            "takes twice the memory",
            target="model.master_dtype",
            written="bf16",
        )
    tf32: Any = draft.get("tf32", "auto")
    if draft.has("tf32"):
        draft.write("tf32", "strategy.matmul_precision", "high" if tf32 == "auto" or flag(tf32) else "highest")
    else:
        draft.assume("tf32", "strategy.matmul_precision", "high", tool="axolotl")


def read_memory(draft: Draft) -> None:
    """Translate recomputation and attention kernels, which change no numbers but roundings."""
    target, moved = "model.gradient_checkpointing", draft.get("activation_offloading", False)
    saved: Any = draft.get("gradient_checkpointing", False)
    if moved not in OFF:
        draft.write("activation_offloading", target, "offload", reason="inputs of layers alone are kept in host memory")
        draft.leave("gradient_checkpointing", "activation_offloading is on")
    elif draft.get("selective_checkpointing") not in OFF:
        draft.note("selective_checkpointing", Outcome.TRANSLATED, target=target, written="selective")
        draft.given.setdefault("model", {})["gradient_checkpointing"] = "selective"
        draft.leave("gradient_checkpointing", "selective_checkpointing is on")
    elif draft.has("gradient_checkpointing"):
        offloads = str(saved).startswith("offload")
        draft.write("gradient_checkpointing", target, "offload" if offloads else "full" if flag(saved) else "none")
    for name in (
        "gradient_checkpointing_kwargs",
        "layer_offloading",
        "selective_checkpointing",
        "activation_offloading",
    ):
        draft.leave(name, "memory only")
    _attention(draft)


def _attention(draft: Draft) -> None:
    """Translate the attention kernel. Raises SpecError for kernels with other numbers."""
    target, given = "model.attn_implementation", draft.get("attn_implementation")
    chosen = [name for name in ATTENTION if flag(draft.get(name, False))]
    field = "attn_implementation" if given is not None else chosen[0] if chosen else ""
    if given in ("sage", "fp8") or "sage_attention" in chosen:
        message = "attention in eight bits is not supported; choose another kernel"
        raise SpecError([Problem(pointer_of(field), message)])
    if field:
        plain = str(given).split("@")[0].split(":")[0] if given is not None else ATTENTION[field]
        kind = attention(_KERNELS.get(plain, plain))
        draft.write(field, target, kind, reason="" if kind == given else "the kernel with the same numbers")
    for name in ATTENTION:
        draft.leave(name, "off")


def read_mesh(draft: Draft) -> None:
    """Translate the axes of processes, and FSDP's options."""
    options: Any = draft.get("fsdp_config", {})
    words = draft.get("fsdp", [])
    if options not in OFF or words not in OFF:
        if isinstance(options, Mapping) and options:
            read_fsdp(draft, "fsdp_config")
        for word in words if isinstance(words, list) else []:
            name = sharding_name(word)
            if name is not None:
                write_sharding(draft, "fsdp", name, None)
            elif word == "offload":
                draft.write("fsdp", "strategy.offload_policy", True)
        draft.leave("fsdp", "every job trains with FSDP2")
        kind = draft.given.get("model", {}).get("dtype", draft.assumed.get("model", {}).get("dtype"))
        draft.differ("with FSDP, gradients are reduced in the compute dtype; fp32 is more exact",
                     target="strategy.reduce_dtype", written=kind)  # fmt: skip
    for name in ("fsdp", "fsdp_config"):
        draft.leave(name, "off")
    sizes = {
        name: number(draft.get(name, 1)) for name in ("dp_shard_size", "dp_replicate_size", "tensor_parallel_size")
    }
    part = "sequence_parallel_degree" if draft.has("sequence_parallel_degree") else "context_parallel_size"
    sizes[part] = number(draft.get(part, 1))
    shards, copies, tensor, parts = (size if isinstance(size, int) and size > 0 else 1 for size in sizes.values())
    draft.take("tensor_parallel_size", "strategy.tp_size", number)
    draft.take(part, "strategy.ulysses_size", number, reason="sequences are shared by Ulysses")
    if draft.has("dp_shard_size"):
        draft.write("dp_shard_size", "strategy.fsdp_size", shards * parts if copies > 1 else 0)
    world = shards * copies * tensor * parts
    field = next((name for name in ("dp_shard_size", "dp_replicate_size") if draft.has(name)), None)
    if field is not None:
        draft.write("dp_replicate_size" if draft.has("dp_replicate_size") else field, "scaling.num_workers", world,
                    reason="the product of all axes")  # fmt: skip
    elif draft.has("ray_num_workers"):
        draft.take("ray_num_workers", "scaling.num_workers", number)
    else:
        draft.need("scaling.num_workers", world, "the file does not say how many processes are started")
    for name in ("ray_num_workers", "sequence_parallel_degree", "context_parallel_size"):
        draft.leave(name, "another field decides")
