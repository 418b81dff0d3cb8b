"""Audit log entries of actions on jobs."""

from collections.abc import Mapping

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from service.domain.access.roles import AuditEntry, Principal
from service.domain.jobs.job import Job


def action_entry(
    caller: Principal,
    action: str,
    job: Job,
    *,
    before: Mapping[str, JsonValue],
    after: Mapping[str, JsonValue],
    now: float,
) -> AuditEntry:
    """Build the entry of an action of the caller on a job."""
    return AuditEntry(now, caller, f"job.{action}", job.spec.project, job.id, before, after)


def change_entry(caller: Principal, action: str, before: Job | None, after: Job | None, *, now: float) -> AuditEntry:
    """Build the entry of a stored change, with the facts that changed. None stands for a job that is not stored."""
    old, new = job_facts(before), job_facts(after)
    was, is_now = ({name: facts[name] for name in facts if old.get(name) != new.get(name)} for facts in (old, new))
    job = after or before
    assert job is not None
    return action_entry(caller, action, job, before=was, after=is_now, now=now)


def job_facts(job: Job | None) -> dict[str, JsonValue]:
    """Return the facts about a job that the audit log records."""
    if job is None:
        return {}
    facts = {
        "name": job.spec.name,
        "state": job.state,
        "wish": job.stop_request,
        "scaling": job.chosen_size,
        "parent": job.parent,
        "code": job.spec.code and job.spec.code.sha256,
    }
    recorded: dict[str, JsonValue] = to_jsonable_python(
        {name: fact for name, fact in facts.items() if fact is not None}
    )
    return recorded
