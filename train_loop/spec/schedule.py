"""`training.lr_scheduler_kwargs:` the options of learning rate schedules, with transformers' names."""

from typing import Any, Literal

from pydantic import Field

from train_loop.spec.base import SpecModel, is_default

Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "constant",
    "constant_with_warmup",
    "polynomial",
    "inverse_sqrt",
    "wsd",
    "reduce_lr_on_plateau",
]
Shape = Literal["linear", "cosine", "1-sqrt"]

SCHEDULE_OPTIONS: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles", "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "wsd": ("num_decay_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    "reduce_lr_on_plateau": ("factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr"),
}
"""The options of each schedule; schedules that are not listed have none."""


PLATEAU: Schedule = "reduce_lr_on_plateau"
"""The schedule that reacts to evaluations."""


class ScheduleOptions(SpecModel):
    """All options of all schedules; null selects the schedule's own default. Newer ones are stored if they are set."""

    num_cycles: float | None = Field(
        default=None,
        gt=0,
        description="cosine waves; null: half a wave, down to the end; cycles of cosine_with_restarts, null: 1",
    )
    min_lr: float | None = Field(
        default=None,
        ge=0,
        description="final learning rate of schedules with min_lr; lowest one of reduce_lr_on_plateau, null: 0",
    )
    min_lr_rate: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="final learning rate of schedules with min_lr as a fraction of learning_rate; null: 0.1, unless "
        "min_lr is set",
    )
    lr_end: float | None = Field(default=None, ge=0, description="final learning rate of polynomial; null: 1e-7")
    power: float | None = Field(default=None, gt=0, description="power of polynomial; null: 1")
    timescale: int | None = Field(
        default=None, gt=0, description="time scale of inverse_sqrt in steps; null: warmup_steps, or 10000"
    )
    num_decay_steps: int | None = Field(
        default=None, ge=1, description="decay steps of wsd; null: the last tenth of the run"
    )
    warmup_type: Shape | None = Field(default=None, description="shape of the warm-up of wsd; null: linear")
    decay_type: Shape | None = Field(default=None, description="shape of the decay of wsd; null: cosine")
    min_lr_ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="first and last learning rate of wsd as a fraction of learning_rate; null: 0",
    )
    warmup_lr_rate: float | None = Field(
        default=None,
        ge=0,
        le=1,
        exclude_if=is_default(None),
        description="first learning rate of cosine_warmup_with_min_lr as a fraction of learning_rate; null: that of a "
        "warm-up which ends one step earlier",
    )
    factor: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        exclude_if=is_default(None),
        description="factor by which reduce_lr_on_plateau lowers the learning rate; null: 0.1",
    )
    patience: int | None = Field(
        default=None,
        ge=0,
        exclude_if=is_default(None),
        description="evaluations without a lower loss that reduce_lr_on_plateau waits for; null: 10",
    )
    threshold: float | None = Field(
        default=None,
        ge=0,
        exclude_if=is_default(None),
        description="decrease of the loss that counts for reduce_lr_on_plateau; null: 1e-4",
    )
    threshold_mode: Literal["rel", "abs"] | None = Field(
        default=None,
        exclude_if=is_default(None),
        description="rel: threshold is a fraction of the lowest loss; abs: a difference; null: rel",
    )
    cooldown: int | None = Field(
        default=None,
        ge=0,
        exclude_if=is_default(None),
        description="evaluations after a reduction that do not count; null: 0",
    )


def check_known(schedule: str | None, given: Any) -> None:
    """Raise ValueError for options that the schedule does not have, before their values are checked."""
    if schedule is None or not isinstance(given, dict):
        return
    known = SCHEDULE_OPTIONS.get(schedule, ())
    unknown = sorted(str(name) for name, value in given.items() if name not in known and value is not None)
    if unknown:
        choice = f"choose from {', '.join(known)}" if known else "it has no options, so remove them"
        raise ValueError(f"lr_scheduler_type={schedule} has no option {', '.join(unknown)}; {choice}")


def check_lr(schedule: Schedule, options: ScheduleOptions, learning_rate: float) -> None:
    """Raise ValueError if a final learning rate contradicts another one, or is not below learning_rate."""
    if options.min_lr is not None and options.min_lr_rate is not None:
        raise ValueError("min_lr and min_lr_rate are two names for one quantity; remove one")
    lr_end = 1e-7 if options.lr_end is None and schedule == "polynomial" else options.lr_end
    for name, end in (("min_lr", options.min_lr), ("lr_end", lr_end)):
        if end is not None and end >= learning_rate:
            raise ValueError(
                f"lr_scheduler_kwargs.{name}={end} is not below learning_rate={learning_rate}; set a lower one"
            )


def check_steps(options: ScheduleOptions, *, warmup_steps: int, steps: int) -> None:
    """Raise ValueError if a run of `steps` optimizer steps is too short for the phases of its schedule."""
    if warmup_steps >= steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} is not less than the {steps} steps of the run, which would end before the "
            f"learning rate is reached; choose at most {steps - 1}"
        )
    decay = options.num_decay_steps or 0
    if warmup_steps + decay > steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} and num_decay_steps={decay} are together more than the {steps} steps of the "
            f"run; choose num_decay_steps at most {steps - warmup_steps}"
        )
