"""Parts of a spec that several fields decide together: warm-up, options of optimizers, adapters."""

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from train_loop.spec.importers.draft import Draft, Drop, put
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import flag, names, number
from train_loop.spec.model import ALL_LINEAR
from train_loop.spec.optimizer import OPTIMIZER_OPTIONS, SCHEDULE_FREE
from train_loop.spec.schedule import PLATEAU

_EVERY = ("all", ALL_LINEAR)
_PATTERN = frozenset("*$|(^\\[")
_CONVERT = {
    "r": number,
    "alpha": number,
    "dropout": number,
    "target_parameters": names,
    "modules_to_save": names,
    "use_rslora": flag,
    "use_dora": flag,
}


def read_warmup(draft: Draft, steps: str, ratio: str) -> None:
    """Translate a warm-up that is given in steps, or as a fraction of the run. Steps above 0 win."""
    count, share = number(draft.get(steps, 0)), number(draft.get(ratio, 0))
    if isinstance(count, float) and 0 < count < 1:
        draft.write(steps, "training.warmup_steps", count)
    elif isinstance(count, float) and count.is_integer():
        draft.write(steps, "training.warmup_steps", int(count))
    elif isinstance(count, int) and count > 0 and draft.has(ratio):
        draft.note(ratio, Outcome.NOT_NEEDED, reason="the warm-up in steps wins")
    elif isinstance(share, int | float) and 0 < share < 1:
        draft.write(ratio, "training.warmup_steps", share)
        draft.leave(steps, "the warm-up is a fraction")
    elif draft.has(ratio):
        draft.drop(ratio, Drop("not a fraction of the run", numbers=True, harmless=(0, 0.0)))


def drop_unused(draft: Draft) -> None:
    """Remove options that the chosen schedule and optimizer do not read, which the spec refuses."""
    training = {**draft.assumed.get("training", {}), **draft.given.get("training", {})}
    if training.get("optimizer") == SCHEDULE_FREE:
        _without_schedule(draft, str(training.get("lr_scheduler_type")), warms=bool(training.get("warmup_steps")))
        return
    schedule = training.get("lr_scheduler_type")
    if schedule in ("constant", PLATEAU) and training.get("warmup_steps"):
        _remove(draft, "warmup_steps", f"the schedule {schedule} has no warm-up")
    used = OPTIMIZER_OPTIONS.get(str(training.get("optimizer", "adamw")))
    for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if used is not None and name not in used and name in training:
            _remove(draft, name, f"{training['optimizer']} does not read it")


def _without_schedule(draft: Draft, given: str, *, warms: bool) -> None:
    """Replace a schedule by the constant rate of schedule-free optimizers, whose warm-up is part of their rule."""
    target, schedule = "training.lr_scheduler_type", "constant_with_warmup" if warms else "constant"
    put(draft.given, target, schedule)
    put(draft.given, "training.lr_scheduler_kwargs", {})
    reason = "averages of the weights replace the schedule"
    new = {"outcome": Outcome.TRANSLATED, "written": schedule, "reason": reason, "changes_numbers": given != "constant"}
    draft.rows = [row.model_copy(update=new) if row.target == target else row for row in draft.rows]


def _remove(draft: Draft, name: str, reason: str) -> None:
    target = f"training.{name}"
    for values in (draft.given, draft.assumed):
        part = values.get("training")
        if isinstance(part, Mapping):
            values["training"] = {one: value for one, value in part.items() if one != name}
    if target == "training.warmup_steps":
        put(draft.given, target, 0)
    draft.rows = [
        row
        if row.target != target
        else row.model_copy(
            update={"outcome": Outcome.NOT_NEEDED, "target": None, "written": None, "reason": reason,
                    "changes_numbers": False}
        )
        for row in draft.rows
    ]  # fmt: skip


def read_adapters(draft: Draft, fields: Mapping[str, str], defaults: Mapping[str, JsonValue], *, tool: str) -> None:
    """Write `model.lora` from the fields of a tool, by field of `model.lora`, and from the tool's own defaults."""
    if "target_modules" in fields:
        _targets(draft, fields["target_modules"], tool=tool)
    for name, convert in _CONVERT.items():
        if name not in fields:
            continue
        draft.take(fields[name], f"model.lora.{name}", convert)
        if name in defaults:
            draft.assume(fields[name], f"model.lora.{name}", defaults[name], tool=tool)


def _targets(draft: Draft, field: str, *, tool: str) -> None:
    """Write the modules with adapters; a pattern of names is left to the user."""
    target, value = "model.lora.target_modules", draft.get(field)
    written: Any = names(value)
    written = [written] if isinstance(written, str) else written
    if not isinstance(written, list) or not written:
        reason = f"{tool} chooses the modules by the model's type; name those that get adapters"
        draft.need(target, ALL_LINEAR, reason, field=field if draft.has(field) else "")
    elif any(one in _EVERY for one in written):
        draft.write(field, target, ALL_LINEAR)
    elif any(_PATTERN & set(str(one)) for one in written):
        draft.need(target, ALL_LINEAR, "a pattern of names; write the last parts of the modules' names", field=field)
    else:
        draft.write(field, target, written)
