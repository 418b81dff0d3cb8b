"""Specs as users send and change them; what cannot be is InvalidSpec."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from pydantic import JsonValue

from service.domain.job import Job
from service.errors import InvalidSpec
from train_loop.spec import (
    JobSpec,
    Problem,
    ScalingSpec,
    SpecError,
    add_positions,
    as_pointer,
    dump,
    load,
    override,
    parse,
    read_yaml,
    refuse_hidden,
    show,
)


def parsed(body: bytes, authorise: Callable[[str], None]) -> JobSpec:
    """Parse a spec that a caller sent; `authorise` is asked for its project before the rest is checked.

    Raises InvalidSpec, and what `authorise` raises.
    """
    try:
        raw = read_yaml(body)
        project = raw.get("project", JobSpec.model_fields["project"].default) if isinstance(raw, dict) else None
        if isinstance(project, str):
            authorise(project)
        spec = parse(raw)
        _check_labels(spec.labels.items())
        return spec
    except SpecError as error:
        raise InvalidSpec(error.problems) from error


@contextmanager
def positions_in(body: bytes) -> Iterator[None]:
    """Add line and column of the YAML body to each problem of an InvalidSpec that the block raises."""
    try:
        yield
    except InvalidSpec as error:
        raise InvalidSpec(add_positions(error.problems, body)) from error


def overridden(job: Job, overrides: Mapping[str, JsonValue]) -> JobSpec:
    """The spec of a job at the size that it has now, with some of it different. Raises InvalidSpec."""
    try:
        spec = override(job.spec.model_copy(update={"scaling": job.asked}), overrides)
        # What the job has already was taken under the rules of its time.
        _check_labels(spec.labels.items() - job.spec.labels.items())
        return spec
    except SpecError as error:
        raise InvalidSpec(error.problems) from error


def _check_labels(labels: Iterable[tuple[str, str]]) -> None:
    """Raise SpecError for labels that would not be shown as they are; stored specs may have some."""
    problems = []
    for key, value in labels:
        for text in (key, value):
            try:
                refuse_hidden(text)
            except ValueError as error:
                problems.append(Problem(as_pointer(["labels", show(key, lines=False)]), str(error)))
    if problems:
        raise SpecError(problems)


def sized(spec: JobSpec, scaling: ScalingSpec) -> JobSpec:
    """A run's spec at another size. Raises InvalidSpec where the size would change what is trained."""
    resized = spec.model_copy(update={"scaling": scaling})
    if scaling.bounds != spec.scaling.bounds and spec.training.global_batch_size is None:
        raise InvalidSpec(
            [
                Problem(
                    "/scaling/num_workers",
                    f"num_workers={scaling.bounds[1]} is not the {spec.scaling.world} of the spec, and a step would "
                    "take another number of sequences; a job is resized where its spec gives "
                    "training.global_batch_size",
                )
            ]
        )
    try:
        return load(dump(resized))
    except SpecError as error:
        raise InvalidSpec(error.problems) from error
