"""Fair slots for expensive work: no key and no project can occupy all of them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from anyio import CancelScope, CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request
from starlette.requests import ClientDisconnect

from service.domain.access.roles import Principal, Role
from service.errors import RateLimited
from service.ports import CallCancelled, Cancellation

T = TypeVar("T")
_RETRY_SECONDS = 5
"""Retry-After of a refused call: the end of the waiting ones is unknown."""


@dataclass(frozen=True)
class Claim:
    """A request for a slot: its key and its project."""

    key: str
    project: str

    @classmethod
    def of(cls, caller: Principal) -> "Claim":
        """Return the claim of a caller. A key with several projects counts as a separate project."""
        projects = caller.projects(Role.EDITOR)
        return cls(caller.id, next(iter(projects)) if projects and len(projects) == 1 else f"key {caller.id}")


class FairThreads:
    """Threads for expensive work, shared fairly between callers. A call ends if its client disconnects."""

    def __init__(self, total: int, *, waiting_per_key: int | None = None) -> None:
        self._threads, self._slots = CapacityLimiter(total), FairSlots(total, waiting_per_key=waiting_per_key)

    async def run(self, request: Request, claim: Claim, work: Callable[[Cancellation], T]) -> T:
        """Do the work in a thread once the claim has a slot, and return its result.

        Raises RateLimited if too many calls wait, ClientDisconnect.
        """
        cancellation = Cancellation()
        with CancelScope() as scope:
            watcher = asyncio.create_task(_cancel_when_gone(request, scope, cancellation))
            try:
                async with self._slots.hold(claim):
                    return await run_sync(work, cancellation, limiter=self._threads)
            except CallCancelled:
                raise ClientDisconnect from None
            finally:
                watcher.cancel()
        raise ClientDisconnect


async def _cancel_when_gone(request: Request, scope: CancelScope, cancellation: Cancellation) -> None:
    """Cancel a call when its client disconnects. Its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
    cancellation.cancel()
    scope.cancel()


class FairSlots:
    """A limit of `total` slots: at most a quarter of them for one key, and half of them for one project.

    A quarter is reserved for projects that hold no slot: a busy project never delays another project's first call.
    A free slot goes to the waiting project with the fewest slots whose last turn was longest ago, and within it to such
    a key. `waiting_per_key` limits the waiting calls of a key, and twice as many those of a project.
    """

    def __init__(self, total: int, *, waiting_per_key: int | None = None) -> None:
        self._total, self._per_key, self._per_project = total, max(1, total // 4), max(1, total // 2)
        self._reserved, self._waiting_per_key = total // 4, waiting_per_key
        self._keys, self._projects = Counter[str](), Counter[str]()
        self._waiting: list[tuple[Claim, asyncio.Future[None]]] = []
        self._turns = 0
        self._last_turns = dict[str, int]()
        """Number of the last turn of each key and project, since the slots were last free."""

    @asynccontextmanager
    async def hold(self, claim: Claim) -> AsyncIterator[None]:
        """Wait for a slot and hold it until the context exits. Raises RateLimited if too many calls wait."""
        self._require_place(claim)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((claim, turn))
        self._hand_out()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._release(claim)
            else:
                self._waiting = [one for one in self._waiting if one[1] is not turn]
            raise
        try:
            yield
        finally:
            self._release(claim)

    def _require_place(self, claim: Claim) -> None:
        if (most := self._waiting_per_key) is None:
            return
        own = sum(one.key == claim.key for one, _ in self._waiting)
        project = sum(one.project == claim.project for one, _ in self._waiting)
        if own >= most or project >= 2 * most:
            whose, number = ("this key", own) if own >= most else (f"project {claim.project}", project)
            raise RateLimited(
                f"{number} calls of {whose} wait for their turn, the maximum; retry when one is answered",
                _RETRY_SECONDS,
            )

    def _hand_out(self) -> None:
        while ready := [one for one in self._waiting if self._may_have(one[0])]:
            claim, turn = min(ready, key=lambda one: self._order(one[0]))
            self._waiting.remove((claim, turn))
            if not turn.done():
                self._keys[claim.key] += 1
                self._projects[claim.project] += 1
                self._turns += 1
                self._last_turns[f"key {claim.key}"] = self._last_turns[f"project {claim.project}"] = self._turns
                turn.set_result(None)

    def _order(self, claim: Claim) -> tuple[int, int, int, int]:
        last = self._last_turns
        project, key = last.get(f"project {claim.project}", 0), last.get(f"key {claim.key}", 0)
        return self._projects[claim.project], project, self._keys[claim.key], key

    def _may_have(self, claim: Claim) -> bool:
        free = self._total - self._keys.total()
        kept = self._reserved if self._projects[claim.project] else 0
        return (
            free > kept and self._keys[claim.key] < self._per_key and self._projects[claim.project] < self._per_project
        )

    def _release(self, claim: Claim) -> None:
        for held, name in ((self._keys, claim.key), (self._projects, claim.project)):
            held[name] -= 1
            if not held[name]:
                del held[name]
        self._hand_out()
        if not self._keys:
            self._last_turns.clear()
