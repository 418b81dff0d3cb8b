"""Many who follow one run: what they share, and that nobody misses a line by it."""

import math
import threading
from collections import Counter
from collections.abc import Hashable
from pathlib import Path

import anyio

from service.adapters.storage.run_dirs import LocalRunDirs
from service.ports import Entry, Place, Tail, Written
from service.use_cases.runs.streams import Follower, Listener, Reader, Recent, Signal
from train_loop.run_dir import JsonLines, RunDir

MANY = 50


class Counting(LocalRunDirs):
    """Counts what is asked of the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Counter[str]()

    def mark(self, run_dir: str, what: Written) -> Hashable:
        self.asked["mark"] += 1
        return super().mark(run_dir, what)

    def tail(self, run_dir: str, what: Written, place: Place) -> Tail:
        self.asked["tail"] += 1
        return super().tail(run_dir, what, place)


def test_those_who_wait_ask_the_disk_together_and_all_of_them_get_every_line(tmp_path: Path) -> None:
    dirs, recent, ended = Counting(), Recent(), threading.Event()
    lines = JsonLines(RunDir(tmp_path).attempt(1).events, attempt=1)
    found: list[list[str]] = [[] for _ in range(MANY)]
    asked: dict[str, int] = {}

    def may_stay() -> bool:
        dirs.asked["listener"] += 1
        return True

    listener = Listener("key-1", may_stay)

    async def follow(texts: list[str]) -> None:
        reader = Reader(dirs, tmp_path.as_uri(), Written("events"))
        async for entry in Follower(reader, ended.is_set, threading.Event(), listener, recent).follow(Place()):
            if isinstance(entry, Entry):
                texts.append(entry.text)
            elif entry is Signal.END:
                return

    async def write() -> None:
        lines.append(event="first")
        before = Counter(tail=-1)
        while before["tail"] != dirs.asked["tail"] or not all(found):
            before = Counter(dirs.asked)
            await anyio.sleep(1.0)
        before, began = Counter(dirs.asked), anyio.current_time()
        await anyio.sleep(2.0)
        asked.update(dirs.asked - before, seconds=math.ceil(anyio.current_time() - began))
        lines.append(event="second")
        await anyio.sleep(0.2)
        lines.append(event="last")
        ended.set()

    async def all_of_them() -> None:
        with anyio.fail_after(120):
            async with anyio.create_task_group() as group:
                for texts in found:
                    group.start_soon(follow, texts)
                group.start_soon(write)

    anyio.run(all_of_them)
    assert len(found[0]) == 3
    assert all(texts == found[0] for texts in found)
    assert asked["mark"] <= 4 * asked["seconds"] + 4, "one look in a quarter of a second serves all"
    assert asked["listener"] <= asked["seconds"] / 2 + 1, "nor is the key of all of them looked up for each"
    assert "tail" not in asked, "nothing was written, and nothing read"
