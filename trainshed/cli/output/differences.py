"""Text output of the comparison of two jobs."""

from service.api.schemas import TensorDigestOut
from trainshed.cli.comparison import CheckpointDifference, JobDifference, StepDifference, TensorDifference
from trainshed.cli.output.printing import show_note, show_text

_LISTED = 10
"""Maximum number of tensors that are listed."""


def show_difference(found: JobDifference) -> None:
    """Print the result in one line, then the tensors that differ."""
    checkpoint = found.checkpoint
    if found.identical:
        tensors = f", {_tensors(checkpoint)}, sha256 {checkpoint.sha256[0]}" if checkpoint else ""
        show_text(f"identical: {_count(found.steps, 'step')}{tensors}")
    elif found.first is not None:
        show_text(f"different: {_step(found.first)}")
    else:
        show_text(f"different: tensors; {_count(found.steps, 'step')} identical")
    if checkpoint and not found.identical:
        _show_tensors(found.jobs, checkpoint)
    if checkpoint is None:
        show_note("tensors were not compared: the jobs have no checkpoint in common")
    for job, steps in zip(found.jobs, found.not_compared, strict=True):
        if steps:
            show_note(f"{_count(steps, 'step')} of {job} not compared, outside {_range(found)}")


def _range(found: JobDifference) -> str:
    if found.first_step is None:
        return "the steps in common (none)"
    return f"steps {found.first_step} to {found.last_step}"


def _step(first: StepDifference) -> str:
    if first.only_in is not None:
        return f"step {first.step} is the first: only {first.only_in} has it"
    values = ", ".join(f"{name} {_value(one)} and {_value(other)}" for name, (one, other) in first.metrics.items())
    return f"step {first.step} is the first: {values}"


def _value(value: object) -> str:
    return "none" if value is None else repr(value)


def _show_tensors(jobs: tuple[str, str], checkpoint: CheckpointDifference) -> None:
    different = checkpoint.different
    if not different:
        show_text(f"{_tensors(checkpoint)} identical, sha256 {checkpoint.sha256[0]}")
        return
    show_text(f"{len(different)} of {_tensors(checkpoint)} different:")
    for one in different[:_LISTED]:
        show_text(f"  {one.name}{_note(jobs, one)}")
    if len(different) > _LISTED:
        show_text(f"  and {len(different) - _LISTED} more (all with --json)")


def _note(jobs: tuple[str, str], tensor: TensorDifference) -> str:
    one, other = tensor.digests
    if one is None or other is None:
        return f": only {jobs[0 if other is None else 1]} has it"
    return "" if _layout(one) == _layout(other) else f": {_layout(one)} and {_layout(other)}"


def _layout(digest: TensorDigestOut) -> str:
    return f"{digest.dtype} {digest.shape}"


def _tensors(checkpoint: CheckpointDifference) -> str:
    return f"{_count(checkpoint.tensors, 'tensor')} of step {checkpoint.step}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
