"""Comparison of two jobs: metrics by step, then the digests of one checkpoint. Pure."""

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, Field, JsonValue

from service.api.schemas import DigestsOut, Line, TensorDigestOut

COMPARED = ("loss", "grad_norm", "eval_loss")
"""Metrics that are equal if two jobs compute the same bits."""
Values = Mapping[str, JsonValue]
"""The compared metrics of a step."""


class StepDifference(BaseModel):
    """The first step whose metrics differ, or that only one of the jobs has."""

    step: int
    only_in: str | None = Field(default=None, description="id of the only job that has the step")
    metrics: dict[str, tuple[JsonValue, JsonValue]] = Field(description="values that differ, of both jobs")


class TensorDifference(BaseModel):
    """A tensor that differs; None stands for the job whose checkpoint lacks it."""

    name: str
    digests: tuple[TensorDigestOut | None, TensorDigestOut | None]


class CheckpointDifference(BaseModel):
    """The comparison of a checkpoint that both jobs have."""

    step: int
    tensors: int = Field(description="number of compared tensors")
    sha256: tuple[str, str]
    different: list[TensorDifference]


class JobDifference(BaseModel):
    """The comparison of two jobs."""

    jobs: tuple[str, str]
    identical: bool
    steps: int = Field(description="number of compared steps")
    first_step: int | None = Field(description="first compared step")
    last_step: int | None = Field(description="last compared step")
    not_compared: tuple[int, int] = Field(description="number of steps outside this range, of both jobs")
    first: StepDifference | None = Field(description="the first step that differs")
    checkpoint: CheckpointDifference | None = Field(description="None if the jobs have no checkpoint in common")


def values_by_step(lines: Iterable[Line], *, last: int | None = None) -> dict[int, Values]:
    """Return the compared metrics of each step up to `last`. A repeated step has those of its last line."""
    found = dict[int, Values]()
    for line in lines:
        step = line.get("step")
        if isinstance(step, int) and (last is None or step <= last):
            found[step] = {name: line[name] for name in COMPARED if name in line}
    return found


def compare(
    jobs: tuple[str, str],
    metrics: tuple[Mapping[int, Values], Mapping[int, Values]],
    digests: tuple[DigestsOut, DigestsOut] | None,
) -> JobDifference:
    """Compare two jobs in the range of steps that both have reached: clones begin later, and running jobs end earlier.

    A step in this range that only one job has is a difference.
    """
    one, other = metrics
    start = max(min(one), min(other)) if one and other else 0
    end = min(max(one), max(other)) if one and other else -1
    steps = sorted(step for step in one.keys() | other.keys() if start <= step <= end)
    first = next((found for step in steps if (found := _difference(jobs, step, one, other)) is not None), None)
    checkpoint = compare_digests(*digests) if digests else None
    return JobDifference(
        jobs=jobs,
        identical=first is None and not (checkpoint and checkpoint.different),
        steps=len(steps),
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if steps else None,
        not_compared=(len(one.keys() - set(steps)), len(other.keys() - set(steps))),
        first=first,
        checkpoint=checkpoint,
    )


def compare_digests(one: DigestsOut, other: DigestsOut) -> CheckpointDifference:
    """Compare the digests of two checkpoints of one step."""
    names = sorted(one.tensors.keys() | other.tensors.keys())
    pairs = {name: (one.tensors.get(name), other.tensors.get(name)) for name in names}
    different = [TensorDifference(name=name, digests=pair) for name, pair in pairs.items() if pair[0] != pair[1]]
    return CheckpointDifference(
        step=one.step, tensors=len(names), sha256=(one.sha256, other.sha256), different=different
    )


def _difference(
    jobs: tuple[str, str], step: int, one: Mapping[int, Values], other: Mapping[int, Values]
) -> StepDifference | None:
    if step not in one or step not in other:
        return StepDifference(step=step, only_in=jobs[0 if step in one else 1], metrics={})
    pairs = {name: (one[step].get(name), other[step].get(name)) for name in COMPARED}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return StepDifference(step=step, metrics=differing) if differing else None
