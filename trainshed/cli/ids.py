"""Lookup and completion of shortened ids: any unique prefix, with or without `job-`, `key-` or `hook-`."""

import re
from collections.abc import Callable, Iterable, Sequence

import httpx

from trainshed import Api, NoKeyError
from trainshed._sync.connection import open_http
from trainshed.cli.exit_codes import fail

LAST = "last"
_WHOLE = re.compile(r"[a-z]+-[0-9a-z]{26}")
_PART = re.compile(r"[a-z]+-[0-9a-z]{1,25}")
_SHORT = len("job-01m7y52w")
"""Minimum length of a shortened id: eight characters encode its creation time to the second."""
_CANDIDATES = 10
_COMPLETION_SECONDS = 0.8


def find_job(api: Api, given: str) -> str:
    """Return the id of a job by its prefix, or `last`. Exits with a one-line error if no job or several match."""
    if given == LAST:
        newest = api.jobs(limit=1).data
        return newest[0].id if newest else fail("no jobs yet; submit one with `trainshed submit FILE`")
    wanted = _with("job-", given)
    # The service itself reports a complete id that does not exist.
    if _WHOLE.fullmatch(wanted):
        return wanted
    candidates = api.jobs(id_prefix=wanted, limit=_CANDIDATES).data if _PART.fullmatch(wanted) else []
    return _only(wanted, [job.id for job in candidates], "trainshed ps")


def find_key_id(api: Api, given: str) -> str:
    """Return the id of a key by its prefix. Exits with a one-line error if no key or several match."""
    return _among(_with("key-", given), lambda: (key.id for key in api.keys().data), "trainshed keys ls")


def find_webhook(api: Api, given: str) -> str:
    """Return the id of a webhook by its prefix. Exits with a one-line error if no webhook or several match."""
    return _among(_with("hook-", given), lambda: (hook.id for hook in api.webhooks().data), "trainshed webhooks ls")


def shorten(ids: Sequence[str]) -> list[str]:
    """Shorten ids to a common readable length that keeps them distinct."""
    length = _SHORT
    while len({one[:length] for one in ids}) < len(set(ids)):
        length += 1
    return [one[:length] for one in ids]


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Complete job ids, newest first. Returns none if the service does not answer quickly: a shell must not hang."""
    return _complete(incomplete, "job-", "/jobs", ("name", "state"))


def complete_key(incomplete: str) -> list[tuple[str, str]]:
    """Complete key ids. Returns none if the service does not answer quickly."""
    return _complete(incomplete, "key-", "/keys", ("name",))


def complete_webhook(incomplete: str) -> list[tuple[str, str]]:
    """Complete webhook ids. Returns none if the service does not answer quickly."""
    return _complete(incomplete, "hook-", "/webhooks", ("url",))


def _complete(incomplete: str, beginning: str, path: str, facts: Sequence[str]) -> list[tuple[str, str]]:
    """Return matching ids with some facts. Ids include the type prefix unless the typed text omits it."""
    lower = incomplete.lower()
    bare = not beginning.startswith(lower[: len(beginning)])
    part = lower if bare else lower[len(beginning) :]
    # Only jobs may be too many to request all of them.
    query = {"limit": "50"} | ({"id": part} if part else {}) if path == "/jobs" else {}
    try:
        with open_http() as http:
            answer = http.get(path, params=query, timeout=_COMPLETION_SECONDS)
        found = answer.raise_for_status().json()["data"]
    except (NoKeyError, OSError, httpx.HTTPError, ValueError, KeyError, RecursionError):
        return []
    return [
        (one["id"].removeprefix(beginning if bare else ""), " ".join(one[fact] for fact in facts))
        for one in found
        if one["id"].startswith(beginning + part)
    ]


def _with(beginning: str, given: str) -> str:
    lower = given.lower()
    return lower if lower.startswith(beginning) else beginning + lower


def _among(wanted: str, known: Callable[[], Iterable[str]], listing: str) -> str:
    return wanted if _WHOLE.fullmatch(wanted) else _only(wanted, known(), listing)


def _only(wanted: str, ids: Iterable[str], listing: str) -> str:
    found = [one for one in ids if one.startswith(wanted)]
    if wanted in found:
        return wanted
    if len(found) > 1:
        fail(f"ambiguous id {wanted}: several ids start with it; give more characters", found)
    return found[0] if found else fail(f"{wanted} not found; list ids with `{listing}`")
