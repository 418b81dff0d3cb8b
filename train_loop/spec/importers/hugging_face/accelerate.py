"""Accelerate's configuration file (`accelerate config`), with FSDP1, FSDP2 or DDP → a spec.

Source: accelerate 1.15, `commands/config/config_args.py`, `commands/launch.py` and `utils/dataclasses.py`.
"""

from collections.abc import Mapping

from pydantic import JsonValue

from train_loop.spec.importers.draft import Draft, Drop, Rule, Take, unneeded
from train_loop.spec.importers.hugging_face.fsdp import read_fsdp
from train_loop.spec.importers.recognise import Source, Tool, names_of
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import attention, dtype, flag, given_number, no_clipping, number

NAME = "Accelerate"
_MARKS = names_of(
    "distributed_type compute_environment downcast_bf16 machine_rank main_training_function num_machines same_network "
    "rdzv_backend dynamo_config megatron_lm_config mpirun_config"
)
_HOSTS = unneeded("Ray places the workers on hosts")
_CLOUD = Drop("TPUs and SageMaker are not supported")
_OTHER = Drop("every job trains with FSDP2")
_ACCUMULATION = Take("training.gradient_accumulation_steps", given_number)
_CLIPPING = Take("training.max_grad_norm", lambda value: no_clipping(given_number(value)))

_RULES: dict[str, Rule] = {
    "compute_environment": unneeded("the service runs on its own cluster"),
    "debug": unneeded("failure.hang_timeout_seconds writes the stacks of all ranks"),
    "machine_rank": _HOSTS,
    "num_machines": _HOSTS,
    "gpu_ids": _HOSTS,
    "main_process_ip": _HOSTS,
    "main_process_port": _HOSTS,
    "rdzv_backend": _HOSTS,
    "same_network": _HOSTS,
    "main_training_function": unneeded("the loop is Trainshed's"),
    "enable_cpu_affinity": unneeded("Ray gives each worker its CPUs"),
    "downcast_bf16": unneeded("TPUs are not supported"),
    "tpu_name": _CLOUD,
    "tpu_zone": _CLOUD,
    "tpu_use_cluster": _CLOUD,
    "tpu_use_sudo": _CLOUD,
    "tpu_vm": _CLOUD,
    "tpu_env": _CLOUD,
    "command_file": _CLOUD,
    "commands": _CLOUD,
    "deepspeed_config.gradient_accumulation_steps": _ACCUMULATION,
    "deepspeed_config.gradient_clipping": _CLIPPING,
    "megatron_lm_config.megatron_lm_num_micro_batches": _ACCUMULATION,
    "megatron_lm_config.megatron_lm_gradient_clipping": _CLIPPING,
    "deepspeed_config.*": Drop("DeepSpeed is not supported; ZeRO stage 3 is FSDP2's default"),
    "deepspeed_config": Drop("DeepSpeed is not supported; ZeRO stage 3 is FSDP2's default"),
    "megatron_lm_config.*": _OTHER,
    "megatron_lm_config": _OTHER,
    "mpirun_config.*": _HOSTS,
    "mpirun_config": _HOSTS,
    "ipex_config.*": unneeded("torch computes without IPEX"),
    "ipex_config": unneeded("torch computes without IPEX"),
    "fp8_config.*": Drop("layers compute in bf16 unless strategy.float8 is set", numbers=True),
    "fp8_config": Drop("layers compute in bf16 unless strategy.float8 is set", numbers=True),
    "fsdp_config": unneeded("FSDP2's own defaults"),
    "tp_config.tp_size": Take("strategy.tp_size", number),
    "tp_config": unneeded("off"),
    "parallelism_config": unneeded("one axis of all processes"),
    "dynamo_backend": Drop("layers are compiled by inductor (model.compile)"),
    "dynamo_config": unneeded("off"),
    "dynamo_config.*": Drop(
        "layers are compiled in the default mode", harmless=(None, "default", False, "NO", "INDUCTOR")
    ),
}
_CONTEXT = Drop("sequences are shared by Ulysses: all heads of a part of a sequence, in exchange for all of it")
_PARALLEL: dict[str, Rule] = {
    "cp_backend": _CONTEXT,
    "cp_comm_strategy": _CONTEXT,
    "cp_handler": _CONTEXT,
    "sp_backend": unneeded("Ulysses is part of the loop"),
    "sp_seq_length": unneeded("data.sequence_length"),
    "sp_seq_length_is_variable": unneeded("samples have one length (data.sequence_length)"),
    "sp_attn_implementation": Take("model.attn_implementation", attention),
}
_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")


def read_accelerate(source: Source) -> Draft:
    """Return the draft of a job from Accelerate's configuration."""
    draft = Draft(source.data)
    world, hosts = number(draft.get("num_processes", -1)), number(draft.get("num_machines", 1))
    known = isinstance(world, int) and isinstance(hosts, int) and world > 0 and hosts > 0 and world % hosts == 0
    _workers(draft, world if isinstance(world, int) and world > 0 else None)
    kind = str(draft.get("distributed_type", "NO")).upper().rpartition(".")[2]
    if kind == "FSDP":
        draft.note("distributed_type", Outcome.NOT_NEEDED, reason="every job trains with FSDP2")
    else:
        reason = "here parameters are sharded, with the same numbers and less memory"
        outcome = Outcome.NOT_NEEDED if kind in ("NO", "MULTI_GPU", "MULTI_CPU") else Outcome.NOT_SUPPORTED
        draft.note("distributed_type", outcome, reason=reason)
    _precision(draft, is_sharded=kind == "FSDP")
    if draft.get("fsdp_config"):
        read_fsdp(draft, "fsdp_config", per_host=world // hosts if known else None)
    _sizes(draft)
    _devices(draft)
    draft.apply(_RULES)
    draft.finish(NAME)
    return draft


def _workers(draft: Draft, world: int | None) -> None:
    if world is not None:
        draft.write("num_processes", "scaling.num_workers", world)
        return
    field = "num_processes" if draft.has("num_processes") else ""
    draft.need("scaling.num_workers", 1, "the file does not say how many processes there are", field=field)


def _precision(draft: Draft, *, is_sharded: bool) -> None:
    given = draft.get("mixed_precision", "no")
    # YAML reads `no` as false.
    name = "no" if given is False else str(given).lower()
    chosen = {"no": "fp32", "fp8": "bf16"}.get(name) or dtype(name)
    if not draft.has("mixed_precision"):
        draft.assume("mixed_precision", "model.dtype", chosen, tool=NAME)
        return
    reason = {"no": "no mixed precision", "fp8": "layers compute in bf16 unless strategy.float8 is set"}.get(name, "")
    draft.write("mixed_precision", "model.dtype", chosen, reason=reason, numbers=name == "fp8")
    if is_sharded and chosen != "fp32":
        reason = "Accelerate also reduces gradients in this dtype; fp32 is more exact"
        draft.write("mixed_precision", "strategy.reduce_dtype", chosen, reason=reason, numbers=True)


def _sizes(draft: Draft) -> None:
    """Translate the axes of parallelism_config; their product is the number of workers."""
    options = draft.get("parallelism_config", {})
    if not isinstance(options, Mapping) or not options:
        return
    given = {name.removeprefix("parallelism_config_"): f"parallelism_config.{name}" for name in options}
    sizes = {name: number(draft.get(given[name], 1)) if name in given else 1 for name in _SIZES}
    if not all(isinstance(size, int) and 0 < size < 2**16 for size in sizes.values()):
        draft.apply({"parallelism_config.*": Drop("sizes are not numbers of processes", numbers=True)})
        return
    copies, shards, tensor, context, sequence = sizes.values()
    ulysses = context * sequence
    values = {
        "dp_replicate_size": ("scaling.num_workers", copies * shards * tensor * ulysses, "the product of all axes"),
        "dp_shard_size": (
            "strategy.fsdp_size",
            shards * ulysses if copies > 1 else 0,
            "shards lie over cp and sp, too",
        ),
        "tp_size": ("strategy.tp_size", tensor, ""),
        "cp_size": ("strategy.ulysses_size", ulysses, _CONTEXT.reason),
        "sp_size": ("strategy.ulysses_size", ulysses, "Ulysses"),
    }
    for name, (target, size, reason) in values.items():
        if name in given and (size != 1 or target != "strategy.ulysses_size"):
            draft.write(given[name], target, size, reason=reason)
    one = unneeded("one")
    draft.apply({given[name].removeprefix("parallelism_config."): one for name in _SIZES if name in given},
                below="parallelism_config")  # fmt: skip
    draft.apply({given.get(name, name).removeprefix("parallelism_config."): rule for name, rule in _PARALLEL.items()},
                below="parallelism_config")  # fmt: skip


def _devices(draft: Draft) -> None:
    on_cpu = flag(draft.get("use_cpu", False))
    resources: dict[str, JsonValue] = {"CPU": 1} if on_cpu else {"CPU": 1, "GPU": 1}
    if draft.has("use_cpu"):
        draft.write("use_cpu", "scaling.resources_per_worker", resources)
    backend = str(draft.get("dynamo_config.dynamo_backend", draft.get("dynamo_backend", "NO"))).upper()
    if backend == "INDUCTOR":
        field = "dynamo_config.dynamo_backend" if draft.has("dynamo_config.dynamo_backend") else "dynamo_backend"
        draft.write(field, "model.compile", True, reason="each layer is compiled separately")


TOOL = Tool(
    NAME,
    marks=_MARKS,
    convert=read_accelerate,
    shared=("mixed_precision", "num_processes", *(name.partition(".")[0] for name in _RULES)),
)
