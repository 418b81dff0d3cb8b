"""Many followers of one run: they share disk reads, and each receives every line."""

import json
import math
import threading
from collections import Counter
from collections.abc import Hashable
from pathlib import Path

import anyio
import pytest
from starlette.concurrency import run_in_threadpool

from service.adapters.storage.run_dirs import LocalRunDirs
from service.ports import LogChunk, LogLine, LogOffset, LogSource
from service.use_cases.runs.streams import LogStream, ReadCache, Reader, Signal, Subscriber
from train_loop.run_dir import JsonLines, RunDir

MANY = 50


class CountingRunDirs(LocalRunDirs):
    """Run directories that count calls to `mark` and `tail`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def mark(self, run_dir: str, what: LogSource) -> Hashable:
        self.calls["mark"] += 1
        return super().mark(run_dir, what)

    def tail(self, run_dir: str, what: LogSource, place: LogOffset) -> LogChunk:
        self.calls["tail"] += 1
        return super().tail(run_dir, what, place)


@pytest.mark.slow
def test_waiting_followers_share_disk_reads_and_receive_every_line(tmp_path: Path) -> None:
    dirs, recent, ended = CountingRunDirs(), ReadCache(), threading.Event()
    lines = JsonLines(RunDir(tmp_path).attempt(1).events, attempt=1)
    found: list[list[str]] = [[] for _ in range(MANY)]
    calls: dict[str, int] = {}

    def may_stay() -> bool:
        dirs.calls["listener"] += 1
        return True

    listener = Subscriber("key-1", may_stay)

    async def follow(texts: list[str]) -> None:
        reader = Reader(dirs, tmp_path.as_uri(), LogSource("events"))
        async for entry in LogStream(reader, ended.is_set, threading.Event(), listener, recent).follow(LogOffset()):
            if isinstance(entry, LogLine):
                texts.append(entry.text)
            elif entry is Signal.END:
                return

    async def write() -> None:
        lines.append(event="first")
        before = Counter(tail=-1)
        while before["tail"] != dirs.calls["tail"] or not all(found):
            before = Counter(dirs.calls)
            await anyio.sleep(1.0)
        before, began = Counter(dirs.calls), anyio.current_time()
        await anyio.sleep(2.0)
        calls.update(dirs.calls - before, seconds=math.ceil(anyio.current_time() - began))
        lines.append(event="second")
        await anyio.sleep(0.2)
        lines.append(event="last")
        ended.set()

    async def run_all() -> None:
        with anyio.fail_after(120):
            async with anyio.create_task_group() as group:
                for texts in found:
                    group.start_soon(follow, texts)
                group.start_soon(write)

    anyio.run(run_all)
    assert len(found[0]) == 3
    assert all(texts == found[0] for texts in found)
    assert calls["mark"] <= 4 * calls["seconds"] + 4, "all followers share four checks per second"
    assert calls["listener"] <= calls["seconds"] / 2 + 1, "all followers share one check of their key"
    assert "tail" not in calls, "without new lines, followers read nothing"


class HeldRunDirs(LocalRunDirs):
    """Run directories whose reads wait until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.released, self.reading, self.most = threading.Event(), 0, 0

    def tail(self, run_dir: str, what: LogSource, place: LogOffset) -> LogChunk:
        self.reading += 1
        self.most = max(self.most, self.reading)
        self.released.wait(60)
        self.reading -= 1
        return super().tail(run_dir, what, place)


def test_streams_that_begin_at_once_leave_threads_to_other_requests(tmp_path: Path) -> None:
    JsonLines(RunDir(tmp_path).attempt(1).events, attempt=1).append(event="first")
    dirs, cache, ended = HeldRunDirs(), ReadCache(), threading.Event()
    ended.set()

    async def follow() -> None:
        reader = Reader(dirs, tmp_path.as_uri(), LogSource("events"))
        stream = LogStream(reader, ended.is_set, threading.Event(), Subscriber("key-1", lambda: True), cache)
        assert [entry async for entry in stream.follow(LogOffset())][-1] is Signal.END

    async def run_all() -> None:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for _ in range(100):
                    group.start_soon(follow)
                while not dirs.reading:
                    await anyio.sleep(0.01)
                for _ in range(20):
                    await run_in_threadpool(int)
                dirs.released.set()

    anyio.run(run_all)
    assert dirs.most <= 4


def test_json_line_beyond_the_limit_is_skipped_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.adapters.storage.run_dirs._LONGEST_LINE", 1 << 20)
    attempt = RunDir(tmp_path).attempt(1)
    lines = JsonLines(attempt.events, attempt=1)
    lines.append(event="first")
    with attempt.events.open("a") as file:
        file.write("x" * (5 << 20) + "\n")
    lines.append(event="last")
    dirs, place, longest, found = LocalRunDirs(), LogOffset(1), 0, list[str]()
    while (chunk := dirs.tail(tmp_path.as_uri(), LogSource("events"), place)).entries:
        place = chunk.entries[-1].after
        longest = max(longest, *(len(entry.text) for entry in chunk.entries))
        found += [entry.text for entry in chunk.entries if "event" in entry.text]
    assert [json.loads(text)["event"] for text in found] == ["first", "last"]
    assert longest <= 1 << 20
