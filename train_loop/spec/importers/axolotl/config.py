"""axolotl's configurations for full, LoRA and QLoRA fine-tuning → a spec."""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.axolotl.adapters import read_adapter
from train_loop.spec.importers.axolotl.data import read_data
from train_loop.spec.importers.axolotl.defaults import DEFAULTS
from train_loop.spec.importers.axolotl.fields import RULES
from train_loop.spec.importers.axolotl.hardware import read_memory, read_mesh, read_precision
from train_loop.spec.importers.axolotl.refused import OFF, PLUGINS, REFUSED
from train_loop.spec.importers.defaults import write_defaults
from train_loop.spec.importers.draft import Draft, Drop, NotSupportedError, pointer_of
from train_loop.spec.importers.folders import read_folder
from train_loop.spec.importers.parts import drop_unused
from train_loop.spec.importers.recognise import Source, Tool, names_of
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import number, schedule, schedule_options

NAME = "axolotl"
_OPTIONS = "training.lr_scheduler_kwargs"
_WARMUP, _MOST_WARMUP = 0.03, 100
"""axolotl's warm-up of a file without one: a fraction of the run, and its limit in steps."""


def read_axolotl(source: Source) -> Draft:
    """Return the draft of a job from a configuration of axolotl. Raises SpecError."""
    draft = Draft(source.data)
    _check_kind(draft)
    read_folder(draft, "base_model", "model.path")
    if draft.has("tokenizer_config"):
        read_folder(draft, "tokenizer_config", "model.tokenizer")
    trains_adapters = read_adapter(draft)
    read_precision(draft, trains_adapters=trains_adapters)
    _length(draft)
    _warmup(draft)
    _schedule(draft)
    _optimizer(draft)
    _groups(draft)
    _checkpoints(draft)
    read_data(draft, every=lambda per_epoch, steps: _every(draft, per_epoch, steps))
    read_memory(draft)
    read_mesh(draft)
    draft.apply(RULES)
    write_defaults(draft, DEFAULTS, NAME)
    draft.assume("save_total_limit", "checkpoint.keep_last", 4, tool=NAME)
    draft.assume("seed", "data.seed", number(draft.get("seed", 42)), tool=f"{NAME}, which is seed")
    drop_unused(draft)
    draft.differ("a seed gives another order of samples, other random weights and other dropout")
    draft.differ("axolotl takes the mean over the tokens of each process; here it is that over the tokens of all")
    draft.finish(NAME)
    return draft


def _check_kind(draft: Draft) -> None:
    """Raise SpecError for runs that are not a full or LoRA fine-tune of a language model, and for missing fields."""
    for field, what in REFUSED.items():
        if draft.get(field) not in OFF:
            message = f"{field} asks for {what}: it is not imported; a full or LoRA fine-tune is"
            raise SpecError([Problem(pointer_of(field), message)])
        draft.leave(field, "off")
    missing = [name for name in ("base_model", "learning_rate") if not draft.has(name)]
    if missing:
        raise SpecError([Problem("", f"axolotl needs {' and '.join(missing)}, and the file has none; add it")])
    if "Classification" in str(draft.get("model_type", draft.get("type_of_model", ""))):
        field = "model_type" if draft.has("model_type") else "type_of_model"
        raise SpecError([Problem(pointer_of(field), "heads of labels are not imported; set model.head in a spec")])
    plugins = draft.get("plugins", [])
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        package = str(plugin).split(".")[-2:][0]
        if package not in PLUGINS:
            message = f"the plugin {plugin!s:.80} may train in another way: it is not imported; remove it from a copy"
            raise SpecError([Problem("/plugins", message)])
    draft.leave("plugins", "other kernels, trackers and evaluations; numbers stay")


def _length(draft: Draft) -> None:
    steps = number(draft.get("max_steps"))
    if isinstance(steps, int) and steps > 0:
        draft.write("max_steps", "training.max_steps", steps)
        draft.leave("num_epochs", "max_steps overrides it")
        return
    draft.leave("max_steps", "not set")
    draft.take("num_epochs", "training.num_train_epochs", number)
    draft.assume("num_epochs", "training.num_train_epochs", 1.0, tool=NAME)


def _steps(draft: Draft) -> int | None:
    """Return the steps of the run; None if the number of rows decides."""
    steps = draft.given.get("training", {}).get("max_steps")
    return steps if isinstance(steps, int) else None


def _warmup(draft: Draft) -> None:
    """Translate the warm-up: steps, or a fraction of the run, which axolotl rounds down."""
    target, total = "training.warmup_steps", _steps(draft)
    count, share = number(draft.get("warmup_steps")), number(draft.get("warmup_ratio"))
    if isinstance(count, int):
        draft.write(
            "warmup_steps", target, 2 if count == 1 else count, reason="never 1 in axolotl" if count == 1 else ""
        )
        draft.leave("warmup_ratio", "warmup_steps decides")
    elif isinstance(count, float):
        raise SpecError([Problem("/warmup_steps", f"axolotl takes a number of steps; write warmup_ratio: {count}")])
    elif isinstance(share, int | float):
        if total is not None:
            draft.write(
                "warmup_ratio",
                target,
                _not_one(int(share * total)),
                reason="of max_steps, rounded down; of the epochs, if they are shorter",
            )
        else:
            reason = "axolotl rounds down: one step less, if the fraction of the run is not whole"
            draft.write("warmup_ratio", target, share, reason=reason, numbers=bool(share))
    elif total is not None:
        steps = _not_one(min(int(_WARMUP * total), _MOST_WARMUP))
        draft.assume(
            "warmup_ratio", target, steps, tool=f"{NAME}: {_WARMUP:.0%} of the run, at most {_MOST_WARMUP} steps"
        )
    else:
        limit = f"with at most {_MOST_WARMUP} steps: write {_MOST_WARMUP} if the run is longer"
        draft.assume("warmup_ratio", target, _WARMUP, tool=f"{NAME}, {limit}")


def _not_one(steps: int) -> int:
    return 2 if steps == 1 else steps


def _schedule(draft: Draft) -> None:
    """Translate the schedule. Raises SpecError for a part of it that has no counterpart."""
    target, name = "training.lr_scheduler_type", draft.get("lr_scheduler") or "cosine"
    least = number(draft.get("cosine_min_lr_ratio"))
    if number(draft.get("cosine_constant_lr_ratio")) and least:
        message = "schedules do not stay at their lowest rate before the end; see lr_scheduler_type: wsd"
        raise SpecError([Problem("/cosine_constant_lr_ratio", message)])
    try:
        chosen: Any = schedule(name)
    except NotSupportedError as error:
        draft.note("lr_scheduler", Outcome.NOT_SUPPORTED, reason=str(error), numbers=True)
        chosen = None
    if chosen == "cosine" and isinstance(least, int | float) and least > 0:
        chosen = "cosine_with_min_lr"
        draft.write("cosine_min_lr_ratio", target, chosen)
        draft.write("cosine_min_lr_ratio", f"{_OPTIONS}.min_lr_rate", least)
    if chosen is not None and draft.has("lr_scheduler"):
        draft.write("lr_scheduler", target, chosen)
    for field in ("cosine_min_lr_ratio", "cosine_constant_lr_ratio"):
        draft.leave(field, "off, or the schedule is not cosine")
    _schedule_options(draft, name)


def _schedule_options(draft: Draft, name: Any) -> None:
    options = draft.get("lr_scheduler_kwargs", {})
    known = schedule_options(options, name)
    for option in options if isinstance(options, Mapping) else ():
        field = f"lr_scheduler_kwargs.{option}"
        if option in known:
            draft.take(field, f"{_OPTIONS}.{option}", number)
        else:
            draft.drop(field, Drop("the schedule has no such option here", numbers=True))


def _optimizer(draft: Draft) -> None:
    """Translate the optimizers that are not those of Trainer, and the default momentum of sgd."""
    name = draft.get("optimizer")
    if name == "muon":
        draft.write("optimizer", "training.optimizer", "muon", reason="steps have another scale", numbers=True)
    elif name == "sgd":
        draft.assume("optim_args", "training.momentum", 0.0, tool="torch's SGD")


def _groups(draft: Draft) -> None:
    """Translate the rate of LoRA+ to a group of parameters."""
    ratio = number(draft.get("loraplus_lr_ratio"))
    if ratio is not None:
        draft.write("loraplus_lr_ratio", "training.groups", [{"params": ["*lora_B*"], "lr_scale": ratio}])


def _every(draft: Draft, per_epoch: str, steps: str) -> JsonValue:
    """Return the steps between two events; 0 if there are none, None if the number of rows decides."""
    count, given = number(draft.get(per_epoch)), number(draft.get(steps))
    total, epochs = _steps(draft), number(draft.get("num_epochs", 1))
    if isinstance(count, int) and count > 0 and isinstance(epochs, int | float) and epochs > 0:
        share = 1 / (count * epochs)
        return 0 if share >= 1 else None if total is None else max(math.ceil(share * total), 1)
    if isinstance(given, float) and 0 < given < 1:
        return None if total is None else max(math.ceil(given * total), 1)
    return int(given) if isinstance(given, int | float) and given >= 1 else 0


def _checkpoints(draft: Draft) -> None:
    """Translate when checkpoints are written: by default after each epoch."""
    target, strategy = "checkpoint.every_steps", str(draft.get("save_strategy", "epoch")).lower()
    field = next((one for one in ("saves_per_epoch", "save_steps", "save_strategy") if draft.get(one)), "")
    every = _every(draft, "saves_per_epoch", "save_steps")
    once = draft.get("max_steps") is None and number(draft.get("num_epochs", 1)) == 1
    if isinstance(every, int) and every > 0:
        draft.write(field, target, every)
    elif field and every == 0 and (strategy == "no" or once):
        draft.write(field, target, None, reason="only the last step is saved")
    elif every == 0 and once:
        draft.assume("save_strategy", target, None, tool=f"{NAME}, which saves after the epoch")
    else:
        draft.need(target, 500, "write the steps between saves, from those of an epoch that trainshed plan prints",
                   field=field)  # fmt: skip
    for name in ("saves_per_epoch", "save_steps", "save_strategy"):
        if name != field:
            draft.leave(name, f"{field or 'the default'} decides")


_HANDLED = names_of(
    "base_model tokenizer_config datasets test_datasets pretraining_dataset lora_r lora_alpha lora_dropout plugins "
    "tf32 lora_target_modules lora_target_parameters lora_modules_to_save load_in_4bit load_in_8bit bf16 fp16 "
    "bfloat16 float16 max_steps warmup_steps warmup_ratio lr_scheduler lr_scheduler_kwargs save_steps save_strategy "
    "eval_steps float32 fsdp eval_strategy evaluation_strategy gradient_checkpointing gradient_checkpointing_kwargs "
    "attn_implementation fsdp_config"
)
"""Fields without a rule, whose meaning depends on others."""
TOOL = Tool(
    NAME,
    marks=names_of(
        "sequence_len num_epochs adapter sample_packing val_set_size dataset_prepared_path lora_target_linear "
        "pad_to_sequence_len flash_attention lora_model_dir unfrozen_parameters"
    ),
    convert=read_axolotl,
    defaults=DEFAULTS,
    shared=(*_HANDLED, *(name.partition(".")[0] for name in (*RULES, *REFUSED))),
)
