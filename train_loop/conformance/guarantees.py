"""The guarantees of own code at toy size, each checked on real ranks of this machine."""

import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from train_loop.code.package import read_package
from train_loop.conformance.finding import Finding
from train_loop.conformance.measure import Step, step_difference, worst_gradient
from train_loop.conformance.probes import (
    MOST_PARAMETERS,
    OneRank,
    compare_steps,
    difference_of_runs,
    examine,
    initialise,
    load_export,
    parallel_step,
    planned_and_measured,
    train_run,
)
from train_loop.conformance.ranks import call_on_ranks
from train_loop.conformance.toy import EVERY, STEPS, ToyMesh, toy_job, write_rows
from train_loop.errors import UserError
from train_loop.spec import JobSpec

TOLERANCE = 1e-5
"""Largest relative difference of a loss or gradient, from rounding in float32."""
_SMALL = 1024
"""Bytes by which a step differs from its plan in a toy of few parameters: step counts, and shards of uneven size."""
ACCEPTED, INITIALISED = "the package is accepted", "initialisation is complete and seeded"
DETERMINISTIC, ACCUMULATED = "a step is deterministic", "accumulation equals one micro-batch"
PARALLEL = {"FSDP 2 equals one rank": ToyMesh(2), "HSDP 2 x 2 equals one rank": ToyMesh(4, fsdp=2)}
SPLIT = {
    "sequence 2 equals one rank": ToyMesh(2, sp=2),
    "FSDP 2 x sequence 2 equals one rank": ToyMesh(4, sp=2),
}
RESUMED, EXPORTED = "a stop and resume keep the bits", "an export loads into the plain module"
PLANNED = "planned bytes are those of a step"
Check = Callable[[], Finding]


class Toy:
    """The toy jobs of a spec's package, and the checks of its guarantees."""

    def __init__(self, spec: JobSpec, folder: Path) -> None:
        assert spec.code is not None, "only own code is checked"
        code = spec.code.model_copy(update={"sha256": read_package(spec.code.package).sha256})
        self.spec, self.folder = spec.model_copy(update={"code": code}), folder
        self.rows = write_rows(spec, folder)
        self.alone: OneRank | None = None
        self.trained = False

    def call(self, world: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on ranks of this machine, whose temporary files are the toy's."""
        return call_on_ranks(world, function, *arguments, environment={"TMPDIR": str(self.folder)})

    def job(self, mesh: ToyMesh) -> JobSpec:
        """Return the toy job on a mesh."""
        return toy_job(self.spec, mesh, self.rows)

    def accepted(self) -> Finding:
        """Check that the model is built, and that batch and loss return the right forms."""
        count = self.call(1, examine, self.job(ToyMesh()))
        if count > MOST_PARAMETERS:
            raise UserError(
                f"the model has {count:,} parameters, and at most {MOST_PARAMETERS:,} are checked; choose a toy size, "
                "for example --set code.config.layers=2"
            )
        return holds(ACCEPTED, f"{count:,} parameters")

    def initialised(self) -> Finding:
        """Check that rules set all tensors, with torch's seed only."""
        other = self.call(1, initialise, self.job(ToyMesh()))
        if other is None:
            return holds(INITIALISED, "two models with one seed have the same bits")
        return fails(INITIALISED, f"{other} differs between two models with one seed", "draw it with torch.nn.init")

    def deterministic(self) -> Finding:
        """Check that two training steps with one seed are the same."""
        self.alone = self.call(1, compare_steps, self.job(ToyMesh()), self.job(ToyMesh(accumulation=2)))
        assert self.alone is not None
        if self.alone.other_bits is None:
            return holds(DETERMINISTIC, "two steps with one seed have the same bits")
        return fails(
            DETERMINISTIC,
            f"two steps with one seed differ in {self.alone.other_bits}",
            "draw random numbers with torch, numpy.random or random, without generators of your own, and keep no "
            "values between steps outside of parameters and buffers",
        )

    def accumulated(self) -> Finding:
        """Check that the loss is a sum over rows with its count."""
        alone = self.alone
        if alone is None or alone.draws:
            return self._draws(ACCUMULATED)
        found = _compare(ACCUMULATED, alone.accumulated, alone.whole)
        return found if alone.fault is None else fails(ACCUMULATED, found.seen, alone.fault)

    def parallel(self, name: str, mesh: ToyMesh) -> Finding:
        """Check that loss and gradients on a mesh equal those of one rank."""
        if self.alone is None or self.alone.draws:
            return self._draws(name)
        return _compare(name, self.call(mesh.world, parallel_step, self.job(mesh)), self.alone.whole)

    def split(self, name: str, mesh: ToyMesh) -> Finding:
        """Check a mesh whose ranks share sequences, if the package says how."""
        if not self.spec.code or not self.spec.code.sequence:
            return not_tested(name, "the package does not say how to split sequences (code.sequence)")
        return self.parallel(name, mesh)

    def resumed(self) -> Finding:
        """Check that a run that stops and resumes ends with the bits of another, in new processes."""
        job, whole, stopped = self.job(ToyMesh(2)), self.folder / "whole", self.folder / "stopped"
        self.call(2, train_run, job, whole)
        self.trained = True
        self.call(2, train_run, job, stopped, EVERY + 1)
        self.call(2, train_run, job, stopped)
        other = difference_of_runs(whole, stopped)
        if other is None:
            return holds(RESUMED, f"{STEPS} steps, resumed after {EVERY + 1}")
        return fails(
            RESUMED,
            f"{other} differs after a resume",
            "keep values that later steps need in parameters or buffers, and draw random numbers with torch, "
            "numpy.random or random",
        )

    def exported(self) -> Finding:
        """Check that the user's own module loads an export, and then has the loss of the run's model."""
        if not self.trained:
            return not_tested(EXPORTED, "no run could be trained")
        plain, ours = self.call(1, load_export, self.folder / "whole")
        error = abs(plain - ours) / max(abs(ours), 1e-12)
        if error <= TOLERANCE:
            return holds(EXPORTED, f"the loss differs by {error:.1e}")
        return fails(
            EXPORTED,
            f"the loss of the module with exported weights differs by {error:.1e}",
            "set buffers in reset_parameters to the values that the constructor gives them",
        )

    def planned(self) -> Finding:
        """Check the plan's bytes of a step."""
        planned, found = self.call(2, planned_and_measured, self.job(ToyMesh(2)))
        if found.used < 1:
            return not_tested(PLANNED, f"{1 - found.used:.0%} of the parameters get no gradient")
        sizes = {name: (planned[name], getattr(found, name)) for name in ("parameters", "gradients", "optimizer")}
        limits = dict.fromkeys(sizes, 0.05)
        if "activations" in planned:
            total = sum(size for name, size in planned.items() if name != "checkpoint_staging")
            sizes["peak"], limits["peak"] = (total, found.peak), 0.1
        errors = {name: abs(measured / max(size, 1) - 1) for name, (size, measured) in sizes.items()}
        worst = max(errors, key=lambda name: errors[name] / limits[name])
        close = all(
            abs(measured - size) <= max(limits[name] * size, _SMALL) for name, (size, measured) in sizes.items()
        )
        text = f"{worst}: {sizes[worst][0]:,} bytes planned, {sizes[worst][1]:,} measured"
        note = "" if "activations" in planned else "; activations are not part of the plan"
        if close:
            return holds(PLANNED, f"{text}{note}")
        return fails(PLANNED, f"{text}{note}", "leave room for the difference, and report it as a fault of Trainshed")

    def _draws(self, name: str) -> Finding:
        if self.alone is None:
            return not_tested(name, "no step on one rank could be computed")
        return not_tested(name, "the loss draws random numbers in evaluation mode, too, and each rank draws its own")


def check(spec: JobSpec) -> Iterator[Finding]:
    """Yield the finding of each guarantee in their order. Raises UserError if nothing can be checked."""
    with tempfile.TemporaryDirectory(prefix="trainshed-check-") as folder:
        yield from _checked(Toy(spec, Path(folder)))


def checks_of(toy: Toy) -> dict[str, Check]:
    """Return the check of each guarantee, by name, in their order."""
    return {
        ACCEPTED: toy.accepted,
        INITIALISED: toy.initialised,
        DETERMINISTIC: toy.deterministic,
        ACCUMULATED: toy.accumulated,
        **{name: partial(toy.parallel, name, mesh) for name, mesh in PARALLEL.items()},
        **{name: partial(toy.split, name, mesh) for name, mesh in SPLIT.items()},
        RESUMED: toy.resumed,
        EXPORTED: toy.exported,
        PLANNED: toy.planned,
    }


def _checked(toy: Toy) -> Iterator[Finding]:
    required = {ACCEPTED: "the package is not accepted", INITIALISED: "the model has no valid weights"}
    reason = None
    for name, run in checks_of(toy).items():
        found = not_tested(name, reason) if reason else result(name, run)
        yield found
        if found.verdict == "does not hold":
            reason = reason or required.get(name)


def result(name: str, run: Check) -> Finding:
    """Return the finding of a check; a user's error is one, too."""
    try:
        return run()
    except UserError as error:
        problem, _, remedy = str(error).rpartition("; ")
        return fails(name, problem or remedy, remedy if problem else "correct the code")


def _compare(name: str, found: Step, expected: Step) -> Finding:
    error = step_difference(found, expected)
    if error <= TOLERANCE:
        return holds(name, f"loss and gradients differ by at most {error:.1e}")
    off = abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-12)
    what = f"the loss by {off:.1e}, " if off > TOLERANCE else ""
    remedy = "let a row's loss depend on that row alone, and reduce over no ranks in the code"
    if math.isnan(error):
        return fails(name, "the loss or a gradient is not finite", "correct the loss")
    worst = worst_gradient(found.gradients, expected.gradients)
    return fails(name, f"differs: {what}gradients by up to {error:.1e} ({worst})", remedy)


def holds(name: str, seen: str) -> Finding:
    """Return the finding of a guarantee that holds."""
    return Finding(guarantee=name, verdict="holds", seen=seen)


def fails(name: str, seen: str, remedy: str) -> Finding:
    """Return the finding of a guarantee that does not hold."""
    return Finding(guarantee=name, verdict="does not hold", seen=seen, remedy=remedy)


def not_tested(name: str, why: str) -> Finding:
    """Return the finding of a guarantee that was not tested."""
    return Finding(guarantee=name, verdict="not tested", seen=why)
