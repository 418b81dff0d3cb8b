"""Parsing, overriding and resizing of specs. Each function raises InvalidSpec."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from service.domain.jobs.job import Job
from service.errors import InvalidSpec
from service.recent import Recent
from train_loop.plan import fitting_sizes
from train_loop.spec import (
    NODE,
    AnyJobSpec,
    JobSpec,
    Problem,
    ScalingSpec,
    SpecError,
    Spelling,
    add_positions,
    as_pointer,
    dump,
    load,
    override,
    parse_any,
    read_yaml,
    refuse_hidden,
    show,
    spellings,
)

_SIZES = [f"/strategy/{name}" for name in ("fsdp_size", "tp_size", "ulysses_size", "ep_size", "efsdp_size")]
"""Fields that the number of workers may break."""


_parsed = Recent[bytes, AnyJobSpec](256)
"""Specs of the small bodies that were sent last. A pure result, so that it holds for all callers and services."""
SMALL = 8192
"""Maximum size in bytes of a body whose spec is kept, or parsed in a group of requests."""


def parse_spec(body: bytes, authorise: Callable[[str], None]) -> AnyJobSpec:
    """Parse a spec that a caller sent; `authorise` is called with its project before the rest is checked.

    An unchanged small body gives the same object. Raises InvalidSpec, and the errors of `authorise`.
    """
    known = _parsed.get(body)
    if known is not None:
        authorise(known.project)
        return known
    spec = _parse_spec(body, authorise)
    if len(body) <= SMALL:
        _parsed.put(body, spec)
    return spec


def _parse_spec(body: bytes, authorise: Callable[[str], None]) -> AnyJobSpec:
    try:
        raw = read_yaml(body)
        project = raw.get("project", JobSpec.model_fields["project"].default) if isinstance(raw, dict) else None
        if isinstance(project, str):
            authorise(project)
        spec = parse_any(raw)
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


def spellings_in(body: bytes, spec: AnyJobSpec) -> tuple[Spelling, ...]:
    """Return the values that a valid body writes in another way than its spec, with the number of each `node`.

    A folder with adapters becomes their settings.
    """
    raw = read_yaml(body)
    size = {"strategy.fsdp_size": spec.strategy.fsdp_size}
    found = [
        replace(one, became={**one.became, **size}) if NODE in one.became.values() else one for one in spellings(raw)
    ]
    if raw.get("strategy", {}).get("fsdp_size") == NODE:
        found.append(Spelling("strategy.fsdp_size", NODE, size))
    model = spec.model
    if model.adapter is not None and model.lora is not None and not raw.get("model", {}).get("lora"):
        found.append(Spelling("model.adapter", model.adapter, {"model.lora": model.lora.model_dump(mode="json")}))
    return tuple(found)


def apply_overrides(job: Job, overrides: Mapping[str, object]) -> AnyJobSpec:
    """Return the spec of a job at its current size with overrides. Raises InvalidSpec."""
    try:
        spec = override(job.spec.model_copy(update={"scaling": job.requested_scaling}), overrides)
        # Only new labels: older jobs may have labels from before the rule.
        _check_labels(spec.labels.items() - job.spec.labels.items())
        return spec
    except SpecError as error:
        raise InvalidSpec(error.problems) from error


def _check_labels(labels: Iterable[tuple[str, str]]) -> None:
    """Raise SpecError for labels with hidden or control characters; stored specs may have some."""
    problems = []
    for key, value in labels:
        for text in (key, value):
            try:
                refuse_hidden(text)
            except ValueError as error:
                problems.append(Problem(as_pointer(["labels", show(key, lines=False)]), str(error)))
    if problems:
        raise SpecError(problems)


def with_digest(spec: AnyJobSpec, sha256: str | None) -> AnyJobSpec:
    """Return a spec that names the SHA-256 of its own code, as it was when the spec was checked."""
    if spec.code is None or sha256 is None:
        return spec
    return spec.model_copy(update={"code": spec.code.model_copy(update={"sha256": sha256})})


def resize_spec(spec: AnyJobSpec, scaling: ScalingSpec) -> AnyJobSpec:
    """Return a run's spec at another size. Raises InvalidSpec if the size would change the training."""
    resized = spec.scaled(scaling)
    if scaling.bounds != spec.scaling.bounds and not spec.resizable:
        raise InvalidSpec(
            [
                Problem(
                    "/scaling/num_workers",
                    f"num_workers={scaling.bounds[1]} differs from {spec.scaling.world} in the spec and would change "
                    "the number of sequences per step; only a job whose spec sets training.global_batch_size can be "
                    "resized",
                )
            ]
        )
    try:
        return load(dump(resized))
    except SpecError as error:
        raise InvalidSpec(error.problems) from error


@contextmanager
def clone_advised(job_id: str, spec: AnyJobSpec) -> Iterator[None]:
    """Replace remedies of an InvalidSpec that the block raises by a clone, if the size of a job needs another strategy.

    A resume changes the size only.
    """
    try:
        yield
    except InvalidSpec as error:
        raise InvalidSpec([_with_clone(problem, job_id, spec.run) for problem in error.problems]) from error


def _with_clone(problem: Problem, job_id: str, spec: JobSpec) -> Problem:
    fewest, most = spec.scaling.bounds
    sizes = fitting_sizes(spec.at(most)) if problem.pointer in _SIZES else None
    if not sizes:
        return problem
    workers = str(most) if fewest == most else f"'{{min: {fewest}, max: {most}}}'"
    changes = {"scaling.num_workers": workers} | {f"strategy.{name}": str(size) for name, size in sizes.items()}
    command = " ".join([f"trainshed clone {job_id}", *(f"--set {name}={value}" for name, value in changes.items())])
    rule = problem.message.partition("; choose ")[0]
    return replace(
        problem,
        message=f"{rule}; a resume keeps the strategy: choose another number of workers, or clone the job with "
        f"{command}",
    )
