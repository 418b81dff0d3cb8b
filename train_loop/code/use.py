"""Own code in the processes of a run: unpacked from the run's copy, then found by its SHA-256."""

from collections.abc import Callable
from typing import TypeVar, cast

from train_loop.code.cleanup import hold
from train_loop.code.keep import check_code_allowed, keep_package
from train_loop.code.load import OwnCode, load_code
from train_loop.code.package import unpack, unpacked
from train_loop.run_dir import RunDir
from train_loop.spec import AnyJobSpec, CodeSpec, InferJobSpec, JobSpec

S = TypeVar("S", bound=JobSpec | InferJobSpec)


def keep_code(spec: AnyJobSpec, run_dir: RunDir, warn: Callable[[str], object]) -> None:
    """Make the run's copy of a spec's code, unless it has one; warn if the package has changed since.

    Raises ModelError if the project may not run code, or if the package changed before the start.
    """
    if spec.code is not None:
        check_code_allowed()
        kept = keep_package(spec.code, run_dir)
        if kept.warning is not None:
            warn(kept.warning)


def with_own_code(spec: S, run_dir: RunDir) -> S:
    """Return a spec whose code, if it has any, is unpacked on this host and named by its SHA-256. Raises ModelError."""
    if spec.code is None:
        return spec
    check_code_allowed()
    package = keep_package(spec.code, run_dir).package
    unpack(package)
    return cast("S", spec.model_copy(update={"code": spec.code.model_copy(update={"sha256": package.sha256})}))


def own_code(spec: CodeSpec) -> OwnCode:
    """Import the functions of code that `with_own_code` has unpacked. Raises ModelError."""
    assert spec.sha256 is not None, "with_own_code gives the spec its SHA-256"
    folder = unpacked(spec.sha256)
    hold(folder)
    return load_code(spec, folder)
