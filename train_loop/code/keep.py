"""The copy of its code that a run keeps from its start on, so that a change of the package does not change the run."""

from dataclasses import dataclass

from train_loop.code.package import Package, read_package, read_zipped
from train_loop.errors import ModelError
from train_loop.run_dir import RunDir, StorageUnavailable, local_path, read_whole, write_durably
from train_loop.spec import CodeSpec
from train_loop.system.input_files import current_policy


@dataclass(frozen=True)
class KeptPackage:
    """The package of a run."""

    package: Package
    warning: str | None = None
    """A sentence for the user if the package has changed since the run began."""


def check_code_allowed() -> None:
    """Raise ModelError if the operator does not allow this job's project to run its own code."""
    policy = current_policy()
    if policy is not None and not policy.code:
        raise ModelError(
            f"project {policy.project} may not run its own code; have the operator add it to TRAINSHED_ALLOW_CODE, or "
            "remove code"
        )


def keep_package(code: CodeSpec, run_dir: RunDir) -> KeptPackage:
    """Return a run's copy of its package; make it from the package at the start of the run.

    Raises ModelError if the package has changed between submission and start, or if the copy is not that of the spec.
    """
    copy = _copy(code, run_dir)
    if copy is None:
        package = _original(code)
        _expect(code, package, "it has changed since the submission; restore it, or submit the job again")
        write_durably(run_dir.code, package.zipped(), below=run_dir.root)
        return KeptPackage(package)
    return KeptPackage(copy, _why_other(code, copy))


def _original(code: CodeSpec) -> Package:
    """Return the package itself. It existed when the service accepted the job: without it, storage is unavailable."""
    path = local_path(code.package)
    if not path.exists():
        raise StorageUnavailable(str(path), "the package of the job's code is missing")
    return read_package(code.package)


def _copy(code: CodeSpec, run_dir: RunDir) -> Package | None:
    try:
        data = read_whole(run_dir.code, below=run_dir.root)
    except (FileNotFoundError, NotADirectoryError):
        return None
    copy = read_zipped(data, str(run_dir.code))
    _expect(code, copy, "the run's copy is damaged; clone the job from its newest checkpoint")
    return copy


def _expect(code: CodeSpec, package: Package, otherwise: str) -> None:
    if code.sha256 is not None and package.sha256 != code.sha256:
        raise ModelError(
            f"{package.uri} has the SHA-256 {package.sha256}, and the job's code.sha256 is {code.sha256}: {otherwise}"
        )


def _why_other(code: CodeSpec, copy: Package) -> str | None:
    """Return a warning if the package is now another one than the run's copy, or cannot be read."""
    try:
        now = read_package(code.package).sha256
    except (ValueError, OSError):
        # The run has its own copy.
        return None
    if now == copy.sha256:
        return None
    return (
        f"{code.package} has changed since the run began: its SHA-256 is {now} and was {copy.sha256}; the run uses "
        "its copy, and a clone with code.sha256: null takes the new code"
    )
