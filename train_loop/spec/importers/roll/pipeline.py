"""ROLL's configuration of a pipeline → a spec of one of its workers that use FSDP2."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.defaults import write_defaults
from train_loop.spec.importers.draft import LOOP, Draft, Drop, pointer_of
from train_loop.spec.importers.parts import drop_unused, read_adapters, read_warmup
from train_loop.spec.importers.recognise import Source, Tool
from train_loop.spec.importers.references import compose, resolve
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.roll.data import read_data, read_length
from train_loop.spec.importers.roll.defaults import defaults_of
from train_loop.spec.importers.roll.fields import ADAPTERS, INFERENCE, PIPELINE, WORKER
from train_loop.spec.importers.roll.infer import keep_inference
from train_loop.spec.importers.values import (
    devices,
    dtype,
    is_absolute,
    job_name,
    model_folder,
    number,
    schedule,
)

NAME = "ROLL"
_TRAIN, _INFER = "fsdp2_train", "fsdp2_infer"
_BATCH = "infer_batch_size"
_DEPTH = 3
_MODELS = {"critic": "reward_pretrain", "student": "student_pretrain", "teacher": "teacher_pretrain"}
_OBJECTIVES = {
    "sft_train": None,
    "student": "the loss of a distillation is not a job's; this one trains on the rows' own tokens",
    "critic": "the loss of a value model is not a job's; this one predicts the next token",
}
_RL = "losses of reinforcement learning are not a job's; this one predicts the next token of its rows"


def _strategies(data: Mapping[str, Any], before: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield path and strategy of each worker."""
    for name, part in data.items():
        if not isinstance(part, Mapping):
            continue
        path, strategy = f"{before}{name}", part.get("strategy_args")
        if isinstance(strategy, Mapping) and isinstance(strategy.get("strategy_name"), str):
            yield path, strategy["strategy_name"]
        elif depth < _DEPTH:
            yield from _strategies(part, f"{path}.", depth + 1)


def read_roll(source: Source) -> Draft:
    """Return the draft of a job from one worker of ROLL's configuration. Raises SpecError."""
    data = source.data
    whole = resolve(compose(data, source.read))
    strategies = dict(_strategies(whole))
    chosen = _choose(strategies, source.worker)
    draft = Draft({**whole, **({"defaults": data["defaults"]} if "defaults" in data else {})})
    draft.worker = chosen
    role, trains = chosen.rpartition(".")[2], strategies[chosen] == _TRAIN
    draft.take("exp_name", "name", job_name)
    _model(draft, chosen, role)
    _precision(draft, chosen)
    _mesh(draft, f"{chosen}.strategy_args.strategy_config", _workers(draft, chosen))
    if trains:
        _memory(draft, f"{chosen}.strategy_args.strategy_config")
        _adapters(draft, f"{chosen}.model_args")
        _training(draft, chosen, is_sft=role == "sft_train")
        read_data(draft, chosen, is_sft=role == "sft_train")
        _objective(draft, chosen, role)
    else:
        read_length(draft)
    _experts(draft, chosen)
    draft.apply(WORKER if trains else {name: rule for name, rule in INFERENCE.items() if name != _BATCH}, below=chosen)
    draft.apply(PIPELINE)
    _others(draft, chosen, whole, is_sft=role == "sft_train")
    if trains:
        write_defaults(draft, defaults_of(chosen), NAME)
        drop_unused(draft)
    else:
        keep_inference(draft, chosen)
    draft.finish(NAME)
    return draft


def _choose(strategies: Mapping[str, str], worker: str | None) -> str:
    """Return the worker to import. Raises SpecError if it is not clear, or does not use FSDP2."""
    ours = {path: strategy for path, strategy in strategies.items() if strategy in (_TRAIN, _INFER)}
    training = [path for path, strategy in ours.items() if strategy == _TRAIN]
    if worker is None and len(training) == 1:
        return training[0]
    if worker in ours:
        return str(worker)
    found = ", ".join(f"{path} ({strategy})" for path, strategy in ours.items()) or "none"
    message = (
        f"invalid worker {worker}; workers with FSDP2 are {found}"
        if worker is not None
        else f"the file has {len(training)} workers with strategy_name={_TRAIN}, so choose one with --worker: {found}"
    )
    raise SpecError([Problem("", message)])


def _model(draft: Draft, worker: str, role: str) -> None:
    own = f"{worker}.model_args.model_name_or_path"
    fields = ["pretrain", own] if role == "sft_train" else [own, _MODELS.get(role, "pretrain"), "pretrain"]
    used = next((field for field in fields if draft.has(field)), None)
    if used is None:
        return
    value = str(draft.get(used))
    if is_absolute(value):
        draft.write(used, "model.path", value)
    else:
        uri = model_folder(value)
        reason = f"run `hf download {value} --local-dir {uri.removeprefix('file://')}` below a storage root"
        draft.need("model.path", uri, reason, field=used)
    for field in dict.fromkeys((*fields, "pretrain", *_MODELS.values())):
        if field != used and draft.has(field):
            draft.note(field, Outcome.NOT_IMPORTED, reason="the model of another worker")


def _precision(draft: Draft, worker: str) -> None:
    compute, model = f"{worker}.strategy_args.strategy_config.param_dtype", f"{worker}.model_args.dtype"
    if not draft.has(compute):
        draft.assume(compute, "model.dtype", "bf16", tool=NAME)
        draft.differ("without param_dtype, ROLL keeps the weights in fp32", target="model.master_dtype", written="fp32")
    else:
        master = "fp32" if dtype(draft.get(compute)) == "fp16" else dtype(draft.get(compute))
        draft.differ(
            "ROLL keeps weights and optimizer states in param_dtype; fp32 is more exact, and takes twice the memory",
            target="model.master_dtype",
            written=master,
        )
    draft.leave(model, "ROLL computes in param_dtype")
    draft.assume(f"{worker}.strategy_args.strategy_config.reduce_dtype", "strategy.reduce_dtype", "fp32",
                 tool=NAME)  # fmt: skip
    draft.differ("ROLL computes under torch.autocast, too; here FSDP2's dtypes alone decide, so roundings differ")


def _workers(draft: Draft, worker: str) -> int | None:
    field = f"{worker}.device_mapping"
    mapping = draft.get(field)
    if mapping is None:
        size = number(draft.get(f"{worker}.world_size"))
        draft.take(f"{worker}.world_size", "scaling.num_workers", number)
        return size if isinstance(size, int) else None
    try:
        count = devices(mapping)
    except ValueError as error:
        raise SpecError([Problem(pointer_of(field), str(error))]) from error
    draft.write(field, "scaling.num_workers", count, reason="Ray chooses the devices")
    draft.leave(f"{worker}.world_size", "device_mapping decides")
    return count


def _adapters(draft: Draft, arguments: str) -> None:
    """Translate adapters, which ROLL trains if there are targets."""
    if not draft.get(f"{arguments}.lora_target"):
        return
    rank = number(draft.get(f"{arguments}.lora_rank", 8))
    defaults: dict[str, JsonValue] = {"r": 8, "alpha": 2 * rank if isinstance(rank, int) else 16, "dropout": 0.0}
    read_adapters(draft, {name: f"{arguments}.{field}" for name, field in ADAPTERS.items()}, defaults, tool=NAME)
    draft.leave(f"{arguments}.freeze_module_prefix", "with adapters, ROLL freezes all other weights without it")


def _mesh(draft: Draft, config: str, world: int | None) -> None:
    """Translate the sizes of the mesh of experts, which follow from the others here."""
    fsdp, experts = number(draft.get(f"{config}.fsdp_size", 1)), number(draft.get(f"{config}.ep_size", 1))
    shards = number(draft.get(f"{config}.efsdp_size", 1))
    copies = next((name for name in ("eddp", "eddp_size") if draft.has(f"{config}.{name}")), None)
    if not all(isinstance(size, int) and size > 0 for size in (experts, shards)) or not isinstance(fsdp, int):
        return
    if experts == 1:
        for name in ("efsdp_size", "eddp", "eddp_size"):
            draft.leave(f"{config}.{name}", "experts are not shared: ep_size is 1")
        return
    whole = world or fsdp
    expected = (whole if fsdp <= 1 or fsdp >= whole else fsdp) // experts
    if draft.has(f"{config}.efsdp_size"):
        reason = f"each expert is sharded over fsdp_size / ep_size = {expected} workers instead; numbers stay"
        same = shards == expected
        draft.write(f"{config}.efsdp_size", "strategy.efsdp_size", shards if same else 0, reason="" if same else reason)
    if copies is not None:
        count = number(draft.get(f"{config}.{copies}"))
        fits = isinstance(count, int) and count * shards * experts == whole
        reason = "it follows from the other sizes" if fits else "efsdp_size x ep_size x eddp are not the workers"
        draft.note(f"{config}.{copies}", Outcome.NOT_NEEDED if fits else Outcome.NOT_SUPPORTED, reason=reason)


def _experts(draft: Draft, worker: str) -> None:
    """Translate what concerns a mixture of experts, and the loss of its router that ROLL's FSDP2 leaves out."""
    config, loss = f"{worker}.strategy_args.strategy_config", f"{worker}.model_args.moe_aux_loss_coef"
    grouped = f"{config}.moe_use_grouped_mm"
    shared = number(draft.get(f"{config}.ep_size", 1)) != 1
    if draft.get(grouped) is True:
        draft.write(grouped, "model.experts_implementation", "grouped_mm")
    elif draft.has(grouped) and shared:
        draft.write(grouped, "model.experts_implementation", "eager", reason="one expert after the other")
    else:
        draft.leave(grouped, "the kernel that fits is chosen (experts_implementation: auto)")
    signs = (grouped, f"{config}.apply_expert_patch", f"{config}.wrap_policy.moe_experts", loss)
    if shared or any(draft.get(field) for field in signs):
        _untile(draft, config)
        reason = "ROLL's FSDP2 adds no auxiliary loss of routers, whatever the model's config says"
        if draft.has(loss):
            draft.write(loss, "training.router_aux_loss.coef", 0, reason=f"{reason}; set coef to add it", numbers=True)
        else:
            draft.differ(reason, target="training.router_aux_loss.coef", written=0)


def _memory(draft: Draft, config: str) -> None:
    """Translate when gradients are reduced, and where optimizer states are."""
    often, moved = f"{config}.reduce_scatter_during_grad_accumulation", "is_offload_optimizer_states_in_train_step"
    reduced = dtype(draft.get(f"{config}.reduce_dtype", "fp32"))
    if draft.get(often) is False and reduced == "fp32":
        draft.write(often, "strategy.gradient_sync", "last")
    elif draft.get(often) is False:
        draft.drop(often, Drop(f"sums in {reduced} would lose small gradients, so each micro-batch is reduced",
                               harmless=()))  # fmt: skip
    else:
        draft.leave(often, "gradients are reduced after each micro-batch")
    shared = number(draft.get(f"{config}.ep_size", 1)) != 1
    if draft.get(moved) is True and not draft.get(f"{config}.offload_policy", False) and not shared:
        draft.write(moved, "strategy.offload_policy", "optimizer")


def _untile(draft: Draft, config: str) -> None:
    tiled, shards = f"{config}.apply_tiled_mlp", f"{config}.tiled_num_shards"
    if draft.get(tiled) is True:
        draft.drop(tiled, Drop("experts are never tiled: numbers stay, and their activations take more memory"))
        draft.leave(shards, "experts are never tiled")


def _training(draft: Draft, worker: str, *, is_sft: bool) -> None:
    arguments = f"{worker}.training_args"
    draft.take(f"{arguments}.lr_scheduler_type", "training.lr_scheduler_type", schedule)
    read_warmup(draft, f"{arguments}.warmup_steps", f"{arguments}.warmup_ratio")
    for field in ("max_steps", f"{arguments}.max_steps"):
        if draft.has(field):
            reason = (
                "ROLL counts epochs of SFT" if is_sft else "ROLL counts rollouts; training.num_train_epochs decides"
            )
            draft.note(field, Outcome.NOT_NEEDED if is_sft else Outcome.NOT_IMPORTED, reason=reason)
    keep = number(draft.get("max_ckpt_to_keep", 0))
    if isinstance(keep, int) and keep > 0:
        draft.write("max_ckpt_to_keep", "checkpoint.keep_last", keep)
    else:
        draft.note("max_ckpt_to_keep", Outcome.NOT_SUPPORTED, target="checkpoint.keep_last", written=2,
                   reason="ROLL keeps all checkpoints; here the last 2 are kept")  # fmt: skip
    draft.assume("save_steps", "checkpoint.every_steps", 50, tool=NAME)
    if number(draft.get(f"{arguments}.weight_decay", 0)):
        draft.differ("ROLL decays all weights; here norms and biases are left out")


def _objective(draft: Draft, worker: str, role: str) -> None:
    reason = _OBJECTIVES.get(role, _RL)
    if reason is not None:
        draft.note(LOOP, Outcome.DIFFERS, reason=f"{worker}: {reason}", numbers=True)


def _others(draft: Draft, worker: str, whole: Mapping[str, Any], *, is_sft: bool) -> None:
    """Report the other workers, and in pipelines of reinforcement learning all that is not known."""
    for path, strategy in _strategies(whole):
        if path != worker:
            hint = f"; import it with --worker {path}" if strategy in (_TRAIN, _INFER) else ""
            draft.note(path, Outcome.NOT_IMPORTED, reason=f"another worker ({strategy:.40}){hint}")
    names: Sequence[str] = () if is_sft else [name for name in whole if name != worker.partition(".")[0]]
    rule = Drop("rollouts, rewards and their losses are not part of a training job", Outcome.NOT_IMPORTED)
    draft.apply({pattern: rule for name in names for pattern in (name, f"{name}.*")})


TOOL = Tool(
    NAME,
    marks=("*.strategy_args.strategy_name", "rollout_batch_size"),
    convert=read_roll,
    defaults=defaults_of("sft_train"),
    shared=("exp_name", "pretrain", "prompt_length", "response_length", "sequence_length"),
)
