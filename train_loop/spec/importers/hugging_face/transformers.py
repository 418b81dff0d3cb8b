"""Hugging Face's `TrainingArguments` and `DistributedConfig` (transformers 4 and 5) → a spec."""

from collections.abc import Mapping

from pydantic import JsonValue

from train_loop.spec.importers.defaults import Answer, write_defaults
from train_loop.spec.importers.draft import Draft, Drop, Rule, has
from train_loop.spec.importers.hugging_face.batches import read_batches
from train_loop.spec.importers.hugging_face.defaults import TRAINER
from train_loop.spec.importers.hugging_face.fsdp import read_fsdp, sharding_name, write_sharding
from train_loop.spec.importers.hugging_face.transformers_fields import DISTRIBUTED, RULES
from train_loop.spec.importers.parts import drop_unused, read_warmup
from train_loop.spec.importers.recognise import Source, Tool, names_of
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import flag, number, schedule_options

NAME = "TrainingArguments"
_DISTRIBUTED = "DistributedConfig"
_MARKS = names_of(
    "per_device_train_batch_size num_train_epochs lr_scheduler_type per_device_eval_batch_size do_train do_eval "
    "do_predict per_gpu_train_batch_size per_gpu_eval_batch_size overwrite_output_dir label_smoothing_factor "
    "average_tokens_across_devices full_determinism logging_strategy disable_tqdm bf16_full_eval fp16_full_eval "
    "prediction_loss_only ignore_data_skip skip_memory_metrics use_liger_kernel"
)
"""Fields that only TrainingArguments have, and the tools that extend them."""
_BEST = {"loss": "eval_loss", "accuracy": "eval_accuracy", "f1": "eval_f1", "mse": "eval_mse"}


def read_training_arguments(source: Source) -> Draft:
    """Return the draft of a job from TrainingArguments."""
    draft = Draft(source.data)
    read_arguments(draft, RULES)
    draft.finish(NAME)
    return draft


def read_arguments(
    draft: Draft, rules: Mapping[str, Rule], *, defaults: Mapping[str, Answer] = TRAINER, tool: str = NAME
) -> None:
    """Translate the fields of TrainingArguments, to which a tool may add its own rules and defaults."""
    _precision(draft)
    _length(draft)
    read_warmup(draft, "warmup_steps", "warmup_ratio")
    _evaluation(draft)
    _checkpoints(draft)
    _sharding(draft)
    _loop(draft)
    read_batches(draft, tool=tool)
    _recomputation(draft)
    draft.apply(rules)
    if draft.given.get("training", {}).get("optimizer") == "sgd":
        draft.assume("optim_args", "training.momentum", 0.0, tool=tool)
    write_defaults(draft, defaults, tool)
    drop_unused(draft)
    draft.need("scaling.num_workers", 1, "TrainingArguments do not say how many processes torchrun starts")
    if draft.get("data_seed") is None:
        draft.assume("data_seed", "data.seed", draft.get("seed", 42), tool=f"{NAME}, which is seed")
    draft.differ("a seed gives another order of samples, other random weights and other dropout")
    draft.differ("epochs follow one another without a shorter batch between them")
    if not any(has(part, "data.on_long_rows") for part in (draft.given, draft.assumed)):
        draft.differ(
            "rows longer than data.sequence_length are split, or left out if they have answers; see on_long_rows"
        )


def _precision(draft: Draft) -> None:
    if has(draft.given, "model.dtype"):
        return
    chosen = [name for name in ("bf16", "fp16") if draft.flag(name)]
    for name in chosen[:1]:
        draft.write(name, "model.dtype", name)
    for name in ("bf16", "fp16"):
        if name not in chosen[:1] and draft.has(name):
            draft.note(name, Outcome.NOT_NEEDED, reason="off" if name not in chosen else "bf16 is on, too")
    if flag(draft.get("tf32", False)):
        draft.write("tf32", "strategy.matmul_precision", "high")


def _recomputation(draft: Draft) -> None:
    """Translate the recomputation of activations. The older name counts if the newer one is not set."""
    old, new = "gradient_checkpointing", "activation_checkpointing"
    if has(draft.given, f"model.{old}"):
        draft.leave(old, "another field decides")
        draft.leave(new, "another field decides")
        return
    field = new if draft.has(new) else old
    draft.take(field, f"model.{old}", lambda on: "full" if flag(on) else "none", reason="memory")
    if field == new:
        draft.leave(old, f"{new} wins")


def _length(draft: Draft) -> None:
    steps = number(draft.get("max_steps", -1))
    if isinstance(steps, int) and steps > 0:
        draft.write("max_steps", "training.max_steps", steps)
        draft.leave("num_train_epochs", "max_steps overrides it")
        return
    draft.leave("max_steps", "not set")
    draft.take("num_train_epochs", "training.num_train_epochs", number)
    draft.assume("num_train_epochs", "training.num_train_epochs", 3.0, tool=NAME)


def _every(draft: Draft, name: str, default: float | None) -> int | None:
    """Return a number of steps; None for a fraction of the run, which is reported."""
    value = number(draft.get(name, default))
    if isinstance(value, float) and 0 < value < 1:
        steps = draft.given.get("training", {}).get("max_steps")
        if isinstance(steps, int):
            return max(int(value * steps), 1)
        draft.drop(name, Drop("a fraction of the run; write a number of steps"))
        return None
    return int(value) if isinstance(value, int | float) and value >= 1 else None


def _logging(draft: Draft) -> None:
    """Translate logging_steps as a fraction of the run; other values stay."""
    share = number(draft.get("logging_steps"))
    if not isinstance(share, float) or not 0 < share < 1:
        return
    steps = draft.given.get("training", {}).get("max_steps")
    reason = "a fraction of max_steps" if steps else "a fraction of the run, whose steps are not known: each step"
    draft.write("logging_steps", "training.logging_steps", max(int(share * (steps or 0)), 1), reason=reason)


def _evaluation(draft: Draft) -> None:
    name = "eval_strategy" if draft.has("eval_strategy") else "evaluation_strategy"
    strategy = str(draft.get(name, "no")).lower().rpartition(".")[2]
    if strategy == "no":
        draft.leave("eval_steps", "eval_strategy: no")
        return
    every = _every(draft, "eval_steps", number(draft.get("logging_steps", 500)))
    if strategy == "epoch" or every is None:
        reason = "write the steps of an epoch, which trainshed plan prints"
        draft.need("training.eval_steps", 500, reason, field=name)
        draft.drop("eval_steps", Drop("eval_strategy is not steps"))
    else:
        draft.write("eval_steps" if draft.has("eval_steps") else name, "training.eval_steps", every)
        draft.note(name, Outcome.TRANSLATED, target="training.eval_steps", written=every)
    draft.need("data.eval.path", "file:///data/eval.jsonl", "the URI of the rows to evaluate")


def _checkpoints(draft: Draft) -> None:
    strategy = str(draft.get("save_strategy", "steps")).lower().rpartition(".")[2]
    every = _every(draft, "save_steps", 500)
    if strategy == "no":
        draft.write("save_strategy", "checkpoint.every_steps", None, reason="only the last step is saved")
        draft.leave("save_steps", "save_strategy: no")
    elif strategy in ("epoch", "best") or every is None:
        draft.need(
            "checkpoint.every_steps", 500, "write the steps of an epoch, which trainshed plan prints",
            field="save_strategy",
        )  # fmt: skip
    else:
        field = "save_steps" if draft.has("save_steps") else "save_strategy"
        if draft.has(field):
            draft.write(field, "checkpoint.every_steps", every)
        draft.assume("save_steps", "checkpoint.every_steps", 500, tool=NAME)
    _best(draft)


def _best(draft: Draft) -> None:
    if not flag(draft.get("load_best_model_at_end", False)):
        return
    metric = str(draft.get("metric_for_best_model", "loss"))
    name = _BEST.get(metric, metric)
    if name not in _BEST.values() and name != "eval_perplexity":
        draft.drop(
            "load_best_model_at_end", Drop(f"the metric {metric:.60} does not exist here; see checkpoint.keep_best")
        )
        return
    higher = draft.get("greater_is_better")
    mode = "max" if (flag(higher) if higher is not None else not metric.endswith("loss")) else "min"
    best: dict[str, JsonValue] = {"metric": name, "mode": mode}
    draft.write("load_best_model_at_end", "checkpoint.keep_best", best, reason="the best checkpoint is kept, too")
    for field in ("metric_for_best_model", "greater_is_better"):
        if draft.has(field):
            draft.note(field, Outcome.TRANSLATED, target="checkpoint.keep_best", written=best)
    evaluated = draft.given.get("training", {}).get("eval_steps")
    saved = draft.given.get("checkpoint", {}).get("every_steps")
    if isinstance(evaluated, int) and isinstance(saved, int) and saved % evaluated:
        reason = "checkpoints are compared after evaluations: every_steps becomes a multiple of eval_steps"
        draft.write("save_steps", "checkpoint.every_steps", max(saved // evaluated, 1) * evaluated, reason=reason)


def _sharding(draft: Draft) -> None:
    chosen = draft.get("fsdp")
    if chosen in (None, False, "", []):
        reason = "without fsdp, Trainer uses DDP; here parameters are sharded, with the same numbers and less memory"
        draft.note("fsdp", Outcome.NOT_NEEDED, reason=reason)
        draft.leave("fsdp_config", "fsdp is off")
        return
    if isinstance(draft.get("fsdp_config"), str):
        draft.drop("fsdp_config", Drop("text; write its fields here as a mapping", numbers=True))
    else:
        read_fsdp(draft, "fsdp_config")
    words = chosen.split() if isinstance(chosen, str) else chosen if isinstance(chosen, list) else []
    for word in words:
        name = sharding_name(word)
        if name is not None:
            write_sharding(draft, "fsdp", name, None)
        elif str(word).lower() == "offload":
            draft.write("fsdp", "strategy.offload_policy", True)
    draft.note("fsdp", Outcome.TRANSLATED, target="strategy", reason="every job trains with FSDP2")
    dtype = draft.given.get("model", {}).get("dtype")
    if dtype is not None:
        reason = "with fsdp, gradients are reduced in the compute dtype; fp32 is more exact"
        draft.differ(reason, target="strategy.reduce_dtype", written=dtype)


def _loop(draft: Draft) -> None:
    _logging(draft)
    options = draft.get("lr_scheduler_kwargs")
    if isinstance(options, Mapping) and options:
        known = schedule_options(options, draft.get("lr_scheduler_type", "linear"))
        for name in options:
            field = f"lr_scheduler_kwargs.{name}"
            if name in known:
                draft.take(field, f"training.lr_scheduler_kwargs.{name}")
            else:
                draft.drop(field, Drop("the schedule has no such option here", numbers=True))
    if flag(draft.get("full_determinism", False)):
        draft.write("full_determinism", "training.deterministic", True)
    limit = number(draft.get("save_total_limit"))
    if isinstance(limit, int) and limit <= 0:
        draft.note("save_total_limit", Outcome.NOT_SUPPORTED, target="checkpoint.keep_last", written=2,
                   reason="without a limit, Trainer keeps all checkpoints; here the last 2 are kept")  # fmt: skip
    if limit is None:
        draft.note("save_total_limit", Outcome.NOT_SUPPORTED, target="checkpoint.keep_last", written=2,
                   reason="Trainer keeps all checkpoints; here the last 2 are kept")  # fmt: skip


def read_distributed_config(source: Source) -> Draft:
    """Return the draft of a job from a DistributedConfig."""
    draft = Draft(source.data)
    sizes = {name: number(draft.get(name, 1)) for name in ("tp_size", "fsdp_size", "dp_replicate_size", "ep_size")}
    tp, fsdp, copies, _ = sizes.values()
    if all(isinstance(size, int) and size >= 1 for size in sizes.values()):
        if flag(draft.get("enable_expert_parallel", False)) and not draft.has("ep_size"):
            draft.write("enable_expert_parallel", "strategy.ep_size", tp, reason="as ep_size=tp_size")
        elif flag(draft.get("enable_expert_parallel", False)):
            draft.leave("enable_expert_parallel", "ep_size says how many")
        if flag(draft.get("enable_sequence_parallel", False)) and tp > 1:
            reason = "transformers does not read it yet; it saves memory, and numbers stay"
            draft.write("enable_sequence_parallel", "strategy.sequence_parallel", True, reason=reason)
        draft.write("fsdp_size", "strategy.fsdp_size", fsdp if copies > 1 else 0)
        if copies > 1 and fsdp == 1:
            draft.write("dp_replicate_size", "strategy.sharding_strategy", "NO_SHARD", reason="copies without shards")
            draft.given["strategy"]["fsdp_size"] = 0
        draft.write("dp_replicate_size", "scaling.num_workers", tp * fsdp * copies, reason="workers of all axes")
    if flag(draft.get("fsdp_mixed_precision", False)):
        reason = "weights stay fp32, layers compute in bf16, and gradients are reduced in fp32"
        draft.write("fsdp_mixed_precision", "model.dtype", "bf16", reason=reason)
    draft.apply(DISTRIBUTED)
    draft.finish(_DISTRIBUTED)
    return draft


_HANDLED = names_of(
    "bf16 fp16 max_steps num_train_epochs eval_steps save_steps fsdp fsdp_config warmup_ratio activation_checkpointing "
    "gradient_checkpointing per_device_train_batch_size per_gpu_train_batch_size gradient_accumulation_steps"
)
"""Fields without a rule, whose meaning depends on others."""
TOOL = Tool(
    NAME,
    marks=_MARKS,
    convert=read_training_arguments,
    defaults=TRAINER,
    shared=(*_HANDLED, *(name.partition(".")[0] for name in RULES)),
)
DISTRIBUTED_TOOL = Tool(
    _DISTRIBUTED,
    marks=names_of("tp_plan fsdp_plan ep_plan"),
    convert=read_distributed_config,
    alone=[name.partition(".")[0] for name in DISTRIBUTED],
)
