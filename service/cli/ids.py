"""Ids may be shortened: to any beginning that only one of them has, with or without what all of them begin with."""

import re
from collections.abc import Callable, Iterable, Sequence

import httpx

from service.address import NoKeyError, find_key, find_url
from service.cli.ends import fail
from service.client import Api

LAST = "last"
_WHOLE = re.compile(r"[a-z]+-[0-9a-z]{26}")
_PART = re.compile(r"[a-z]+-[0-9a-z]{1,25}")
_SHORT = len("job-01m7y52w")
"""Eight characters of an id tell the second in which it was made."""
_CANDIDATES = 10
_COMPLETION_SECONDS = 0.8


def find_job(api: Api, given: str) -> str:
    """The id of the job that is meant. Ends the command with a readable line where it is none, or more than one."""
    if given == LAST:
        newest = api.jobs(limit=1).data
        return newest[0].id if newest else fail("there is no job yet; `trainshed submit FILE` makes one")
    wanted = _with("job-", given)
    # Of a whole one the service says itself whether it is there.
    if _WHOLE.fullmatch(wanted):
        return wanted
    candidates = api.jobs(id_prefix=wanted, limit=_CANDIDATES).data if _PART.fullmatch(wanted) else []
    return _only(wanted, [job.id for job in candidates], "trainshed ps")


def find_key_id(api: Api, given: str) -> str:
    """The id of the key that is meant. Ends the command likewise."""
    return _among(_with("key-", given), lambda: (key.id for key in api.keys().data), "trainshed keys ls")


def find_webhook(api: Api, given: str) -> str:
    """The id of the webhook that is meant. Ends the command likewise."""
    return _among(_with("hook-", given), lambda: (hook.id for hook in api.webhooks().data), "trainshed webhooks ls")


def shorten(ids: Sequence[str]) -> list[str]:
    """Each id as short as a person wants to read it, and as long as it takes to tell it from the others."""
    length = _SHORT
    while len({one[:length] for one in ids}) < len(set(ids)):
        length += 1
    return [one[:length] for one in ids]


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Jobs for the shell, newest first; none where nobody answers at once: a shell must not hang."""
    return _complete(incomplete, "job-", "/jobs", ("name", "state"))


def complete_key(incomplete: str) -> list[tuple[str, str]]:
    """Keys for the shell, likewise."""
    return _complete(incomplete, "key-", "/keys", ("name",))


def complete_webhook(incomplete: str) -> list[tuple[str, str]]:
    """Webhooks for the shell, likewise."""
    return _complete(incomplete, "hook-", "/webhooks", ("url",))


def _complete(incomplete: str, beginning: str, path: str, facts: Sequence[str]) -> list[tuple[str, str]]:
    """What there is that begins so, with some facts about it; with what all begin with only where it was typed."""
    lower = incomplete.lower()
    bare = not beginning.startswith(lower[: len(beginning)])
    part = lower if bare else lower[len(beginning) :]
    # Of jobs alone there may be too many to be sent all.
    query = {"limit": "50"} | ({"id": part} if part else {}) if path == "/jobs" else {}
    try:
        answer = httpx.get(
            f"{find_url()}{path}",
            params=query,
            headers={"Authorization": f"Bearer {find_key()}"},
            timeout=_COMPLETION_SECONDS,
        )
        found = answer.raise_for_status().json()["data"]
    except (NoKeyError, OSError, httpx.HTTPError, ValueError, KeyError):
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
        fail(f"{wanted} is the beginning of several ids; write more of the one that you mean", found)
    return found[0] if found else fail(f"no id begins with {wanted}; `{listing}` lists what there is")
