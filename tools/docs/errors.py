"""The reference of error codes: the service's errors, the reasons of jobs, and the exit codes of commands."""

from collections.abc import Iterator

from service.domain.jobs.reason import MEANINGS
from service.errors import ServiceError
from tools.docs.markdown import code, sentence, table
from trainshed.cli.exit_codes import Exit


def page() -> str:
    """Return the Markdown of the page."""
    problems = [(code(name), status, meaning) for name, (status, meaning) in sorted(service_errors().items())]
    reasons = [(code(one), sentence(meaning)) for one, meaning in sorted(MEANINGS.items())]
    exits = [(code(str(int(one))), sentence(one.meaning)) for one in Exit]
    return (
        "# Error codes\n\n"
        "Codes are stable across versions.\n\n"
        "## Problems of the REST API\nThe `code` of an `application/problem+json` response. Other codes are the phrase "
        "of the status, such as `not_found` or `method_not_allowed`.\n\n"
        + table(("code", "status", "meaning"), problems)
        + "\n## Reason codes\nThe `reason.code` of a job or attempt, and the `code` of `outcome.json`. "
        "[Operations](../operate/operations.md#when-a-job-makes-no-progress) has remedies.\n\n"
        + table(("code", "meaning"), reasons)
        + "\n## Exit codes\nThe exit codes of `trainshed`. [The command line](../guides/cli.md#exit-codes) and "
        "[operations](../operate/operations.md#start) describe them in detail.\n\n" + table(("code", "meaning"), exits)
    )


def service_errors() -> dict[str, tuple[str, str]]:
    """Return the statuses and meanings of each code; several errors may share a code."""
    found = dict[str, tuple[str, str]]()
    every: list[type[ServiceError]] = [ServiceError, *_subclasses(ServiceError)]
    for error in every:
        if error.code == ServiceError.code and error is not ServiceError:
            # Not for callers: the service handles it.
            continue
        meaning = "an unexpected error" if error is ServiceError else (error.__doc__ or "").split("\n\n")[0]
        status, meanings = found.get(error.code, ("", ""))
        statuses = dict.fromkeys([*filter(None, status.split(", ")), str(error.status)])
        found[error.code] = (", ".join(statuses), " ".join(filter(None, (meanings, sentence(meaning)))))
    return found


def _subclasses(error: type[ServiceError]) -> Iterator[type[ServiceError]]:
    for one in error.__subclasses__():
        yield one
        yield from _subclasses(one)
