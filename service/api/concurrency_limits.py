"""Fair slots for expensive work: no key and no project can occupy all of them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from service.domain.access.roles import Principal, Role

T = TypeVar("T")
Given = TypeVarTuple("Given")


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


@dataclass(frozen=True)
class Checks:
    """Threads for spec checks, shared fairly between callers."""

    threads: CapacityLimiter
    slots: "FairSlots"

    async def run(self, caller: Principal, use_case: Callable[[*Given], T], *given: *Given) -> T:
        """Run the use case in a thread once the caller has a slot, and return its result."""
        async with self.slots.hold(Claim.of(caller)):
            return await run_sync(use_case, *given, limiter=self.threads)


class FairSlots:
    """A limit of `total` slots: at most a quarter of them for one key, and half of them for one project.

    A quarter is reserved for projects that hold no slot: a busy project never delays another project's first call.
    A free slot goes to the waiting project with the fewest slots, and within it to the oldest call.
    """

    def __init__(self, total: int) -> None:
        self._total, self._per_key, self._per_project = total, max(1, total // 4), max(1, total // 2)
        self._reserved = total // 4
        self._keys, self._projects = Counter[str](), Counter[str]()
        self._waiting: list[tuple[Claim, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def hold(self, claim: Claim) -> AsyncIterator[None]:
        """Wait for a slot and hold it until the context exits."""
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

    def _hand_out(self) -> None:
        while ready := [one for one in self._waiting if self._may_have(one[0])]:
            claim, turn = min(ready, key=lambda one: self._projects[one[0].project])
            self._waiting.remove((claim, turn))
            if not turn.done():
                self._keys[claim.key] += 1
                self._projects[claim.project] += 1
                turn.set_result(None)

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
