"""Group commit: what comes while somebody writes is written at once, and each has its own trouble."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.adapters.sql.together import Together


def test_what_waits_is_written_at_once() -> None:
    written, first, go_on = list[list[int]](), threading.Event(), threading.Event()

    def write(items: Sequence[int]) -> None:
        if not first.is_set():
            first.set()
            assert go_on.wait(10)
        written.append(sorted(items))

    together = Together(write)
    with ThreadPoolExecutor(9) as pool:
        done = [pool.submit(together, 0)]
        assert first.wait(10)
        done += [pool.submit(together, number) for number in range(1, 9)]
        while len(together._waiting) < 8:
            threading.Event().wait(0.01)
        go_on.set()
        assert [one.result(10) for one in done] == [None] * 9
    assert written == [[0], list(range(1, 9))]


def test_one_that_fails_fails_alone() -> None:
    written = set[int]()

    def write(items: Sequence[int]) -> None:
        if any(item % 7 == 3 for item in items):
            raise ValueError(f"not {items}")
        written.update(items)

    together = Together(write)

    def ask(number: int) -> str | None:
        try:
            together(number)
        except ValueError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(200)))
    assert found == [f"not [{n}]" if n % 7 == 3 else None for n in range(200)]
    assert written == {n for n in range(200) if n % 7 != 3}


def test_who_is_interrupted_leaves_nobody_waiting() -> None:
    def write(items: Sequence[int]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Together(write)(1)
