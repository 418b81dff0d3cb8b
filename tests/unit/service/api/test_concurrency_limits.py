"""Fair slots for spec checks: limits per key and per project."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from service.api.concurrency_limits import Claim, FairSlots, FairThreads
from service.domain.access.roles import OPERATOR, Principal, Role
from service.errors import RateLimited
from service.ports import Cancellation


class Callers:
    """Calls that hold their slots until `leave` is set."""

    def __init__(self, slots: FairSlots) -> None:
        self.slots, self.held, self.leave = slots, list[Claim](), asyncio.Event()

    async def call(self, claim: Claim) -> None:
        """Hold a slot."""
        async with self.slots.hold(claim):
            self.held.append(claim)
            await self.leave.wait()


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_one_key_holds_at_most_a_quarter_and_another_project_starts_at_once() -> None:
    async def scenario() -> None:
        callers = Callers(FairSlots(32))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(36):
                tasks.create_task(callers.call(Claim("loud", "beta")))
            await _settled()
            assert Counter(callers.held) == {Claim("loud", "beta"): 8}
            for key in range(40):
                tasks.create_task(callers.call(Claim(f"beta {key}", "beta")))
            await _settled()
            assert len(callers.held) == 16
            for key in range(40):
                tasks.create_task(callers.call(Claim(f"gamma {key}", "gamma")))
            await _settled()
            assert len(callers.held) == 24
            tasks.create_task(callers.call(Claim("quiet", "alpha")))
            await _settled()
            assert callers.held[-1] == Claim("quiet", "alpha")
            callers.leave.set()
        assert len(callers.held) == 36 + 40 + 40 + 1

    asyncio.run(scenario())


@pytest.mark.parametrize("total", [1, 2, 4])
def test_newcomer_waits_for_running_calls_only(total: int) -> None:
    async def scenario() -> list[Claim]:
        slots, order = FairSlots(total), list[Claim]()

        async def call(claim: Claim) -> None:
            async with slots.hold(claim):
                order.append(claim)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            for claim in [Claim("loud", "beta")] * 6 + [Claim("other", "beta")] * 2 + [Claim("quiet", "alpha")] * 2:
                tasks.create_task(call(claim))
        return order

    order = [claim.key for claim in asyncio.run(scenario())]
    assert order.index("quiet") <= total
    assert order[: order.index("loud") + 5].count("loud") <= 3, "projects take turns, and keys within one"
    assert order.index("other") <= 2 * total + 1


def test_waiting_calls_of_a_key_and_of_a_project_are_limited() -> None:
    async def scenario() -> None:
        callers = Callers(FairSlots(1, waiting_per_key=2))
        async with asyncio.TaskGroup() as tasks:
            for claim in [Claim("a", "p")] * 3 + [Claim("b", "p")] * 2:
                tasks.create_task(callers.call(claim))
            await _settled()
            for claim, whose in ((Claim("a", "p"), "this key"), (Claim("c", "p"), "project p")):
                with pytest.raises(RateLimited, match=whose):
                    await callers.call(claim)
            tasks.create_task(callers.call(Claim("c", "q")))
            await _settled()
            callers.leave.set()
        assert len(callers.held) == 6

    asyncio.run(scenario())


def test_call_that_waits_leaves_the_queue_if_its_client_disconnects() -> None:
    async def scenario() -> None:
        threads, gone, go = FairThreads(1), asyncio.Event(), threading.Event()

        async def stays() -> Message:
            await asyncio.sleep(600)
            raise AssertionError

        async def leaves() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        def run(receive: Receive, work: Callable[[Cancellation], object]) -> asyncio.Task[object]:
            request = Request({"type": "http"}, receive)
            return asyncio.create_task(threads.run(request, Claim("a", "p"), work))

        first = run(stays, lambda _: go.wait(60))
        second = run(leaves, lambda _: pytest.fail("its client has gone"))
        third = run(stays, lambda _: "third")
        await _settled()
        gone.set()
        with pytest.raises(ClientDisconnect):
            await second
        go.set()
        assert (await first, await third) == (True, "third")

    asyncio.run(scenario())


def test_cancelled_call_releases_its_slot() -> None:
    async def scenario() -> None:
        callers = Callers(FairSlots(4))
        first = asyncio.create_task(callers.call(Claim("a", "p")))
        second = asyncio.create_task(callers.call(Claim("a", "p")))
        third = asyncio.create_task(callers.call(Claim("a", "p")))
        await _settled()
        assert len(callers.held) == 1
        second.cancel()
        first.cancel()
        await _settled()
        assert len(callers.held) == 2
        callers.leave.set()
        await third

    asyncio.run(scenario())


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=60), st.integers(4, 12))
def test_limits_hold_and_every_call_gets_a_slot(calls: list[tuple[int, int]], total: int) -> None:
    async def scenario() -> None:
        slots, now, done = FairSlots(total), list[Claim](), list[Claim]()

        async def call(claim: Claim) -> None:
            async with slots.hold(claim):
                now.append(claim)
                assert len(now) <= total
                assert max(Counter(one.key for one in now).values()) <= max(1, total // 4)
                assert max(Counter(one.project for one in now).values()) <= max(1, total // 2)
                await asyncio.sleep(0)
                now.remove(claim)
                done.append(claim)

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for key, project in calls:
                tasks.create_task(call(Claim(f"{project} {key}", str(project))))
        assert len(done) == len(calls)

    asyncio.run(scenario())


def test_claim_of_key_with_several_projects_uses_the_key() -> None:
    one = Principal("key-1", "a", {"nlp": Role.EDITOR, "vision": Role.VIEWER})
    several = Principal("key-2", "b", {"nlp": Role.EDITOR, "vision": Role.EDITOR})
    assert Claim.of(one) == Claim("key-1", "nlp")
    assert Claim.of(several) == Claim("key-2", "key key-2")
    assert Claim.of(OPERATOR).project == "key operator"
