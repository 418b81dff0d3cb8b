"""Warm-up and optimizer options, whose meaning depends on other fields."""

from collections.abc import Mapping

from train_loop.spec.importers.draft import Draft, Drop, put
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import number
from train_loop.spec.optimizer import OPTIMIZER_OPTIONS, SCHEDULE_FREE
from train_loop.spec.schedule import PLATEAU


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
