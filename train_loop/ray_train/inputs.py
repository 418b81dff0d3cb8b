"""Inputs of a run: data, model and tokenizer. Reads are retried while their storage is unavailable."""

import logging
from collections.abc import Callable
from typing import TypeVar

from train_loop.data.prepare.sources import is_missing
from train_loop.errors import UserError
from train_loop.run_dir import StorageUnavailable, is_transient
from train_loop.spec import JobSpec
from train_loop.system.retry import retry_storage

T = TypeVar("T")
log = logging.getLogger(__name__)


def missing_inputs(spec: JobSpec) -> list[str]:
    """Return the paths of data, model and tokenizer that are missing on this host."""
    paths = [path for source in (*spec.data.sources, *spec.data.eval_sources) for path in source.paths]
    of_model = (spec.model.path, spec.model.adapter, spec.model.tokenizer)
    paths += [path for path in (*of_model, spec.data.template_file) if path is not None]
    return [path for path in paths if is_missing(path)]


def read_inputs(
    spec: JobSpec,
    read: Callable[[], T],
    *,
    cause: Callable[[BaseException], BaseException] = lambda error: error,
    on_first_failure: Callable[[str, BaseException], None] | None = None,
) -> T:
    """Read with the retries of `retry_storage`. If a path is missing, a UserError is retried as unavailable storage.

    All paths existed when the service accepted the job. `cause` unwraps errors. `on_first_failure` is called with the
    missing paths and the first error. Raises StorageUnavailable if a path is still missing after the timeout.
    """

    def may_pass(error: BaseException) -> bool:
        found = cause(error)
        return is_transient(found) or (isinstance(found, UserError) and bool(missing_inputs(spec)))

    def report_missing(error: BaseException) -> None:
        paths, found = ", ".join(missing_inputs(spec)), cause(error)
        log.warning("inputs are missing; the read is retried: %s", found)
        if on_first_failure is not None:
            on_first_failure(paths, found)

    try:
        return retry_storage(read, may_pass=may_pass, on_first_failure=report_missing)
    except UserError:
        missing = missing_inputs(spec)
        if missing:
            # Not chained: `cause` would return the UserError.
            raise StorageUnavailable(", ".join(missing), "it is missing or an empty folder") from None
        raise
