"""The event `out_of_memory`: rank, memory estimate, and count since the newest checkpoint."""

import logging
from typing import Any

from train_loop.errors import UserError
from train_loop.faults.micro_batch_choices import as_chosen
from train_loop.model.folder import model_shape
from train_loop.plan import memory_advice, memory_terms
from train_loop.run_dir import RunDir, storage_may_fail
from train_loop.spec import JobSpec
from train_loop.telemetry.event_log import read_attempts

log = logging.getLogger(__name__)
OUT_OF_MEMORY = "out_of_memory"
"""Name of the event of a rank that ran out of memory."""


def groups_without_memory(run_dir: RunDir, committed: int | None) -> dict[tuple[int, int], str]:
    """Return the errors of worker groups that ran out of memory since the newest committed step.

    The keys are attempt and epoch.
    """
    return {
        (int(line["attempt"]), int(line.get("epoch", 0))): str(line.get("error", ""))
        for line in read_attempts(run_dir)
        if line.get("event") == OUT_OF_MEMORY and (line.get("committed") or 0) >= (committed or 0)
    }


def describe_killed(fields: dict[str, Any], run_dir: RunDir, spec: JobSpec) -> dict[str, Any]:
    """Return the event fields of a killed rank, with newest checkpoint, estimated sizes and remedies."""
    committed: int | None = None
    try:
        with storage_may_fail(lambda error: log.warning("the model and checkpoints cannot be read: %s", error)):
            committed = max(run_dir.checkpoint_folders(), default=None)
            spec = as_chosen(spec, run_dir)
            shape = model_shape(spec.model)
            estimate = {term.name: term.bytes for term in memory_terms(spec, shape, "host")}
            error = f"{fields['error']}; {memory_advice(spec, shape, 'host')}"
            return {**fields, "error": error, "committed": committed, "estimate": estimate}
    except UserError as error:
        log.warning("the model's sizes cannot be read: %s", error)
    return {**fields, "committed": committed}
