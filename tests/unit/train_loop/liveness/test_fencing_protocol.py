"""The fencing protocol under arbitrary pauses: groups pause between any two storage operations, or die.

Every group acts as a real one: raise the fence, clean up, select its checkpoint, train, append lines, save,
remove older checkpoints. No decision here depends on a clock.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import Mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.builders.checkpoints import checkpoint, unfinished
from tests.support.builders.checkpoints import manifest as draft_of
from tests.support.builders.searches import seeds
from tests.support.faults.pauses import ObjectPath, Schedule, paused_storage
from train_loop.checkpoint import manifest as manifest_module
from train_loop.checkpoint.manifest import describe_file, verify
from train_loop.checkpoint.retention import retire_others
from train_loop.checkpoint.store.base import CheckpointStore
from train_loop.checkpoint.store.open import open_store
from train_loop.errors import FencedError
from train_loop.liveness.fencing import begin_group, check_fence
from train_loop.run_dir import Fence, Manifest, RunDir, lines, read_lines, segments
from train_loop.spec import CheckpointSpec
from train_loop.telemetry.event_log import EventLog, group_journal

SCHEDULES = {"folders": seeds(200, more=2_000), "objects": seeds(200, more=2_010)}
"""Seeds per kind of storage; both tests take about the same time."""
T = TypeVar("T")
_SPEC = CheckpointSpec(keep_last=1)


@dataclass
class World:
    """The actions of all groups of one schedule, in the order in which they happened."""

    run_dir: RunDir
    schedule: Schedule
    fence: Fence = field(default_factory=lambda: Fence(0))
    known: dict[Fence, set[str]] = field(default_factory=dict)
    """Digests of the checkpoints that verified when each group listed them."""
    acknowledged: int = 1
    """The newest step that the newest group of that time committed."""
    logged: list[tuple[Fence, int]] = field(default_factory=list)
    """Steps whose lines the newest group of that time wrote."""

    def record_listing(self, token: Fence) -> None:
        """Record that a group now lists the checkpoints."""
        with self.schedule.unpaused():
            self.known[token] = {one.digest for one in self.valid()}

    def select(self, token: Fence, step: int) -> None:
        """Record that a group resumes from a step."""
        if self._is_newest(token):
            assert step >= self.acknowledged, f"{token} resumes from {step}, {self.acknowledged} was committed"

    def commit(self, token: Fence, step: int) -> None:
        """Record that a group committed a step."""
        if self._is_newest(token):
            self.acknowledged = max(self.acknowledged, step)

    def fail(self, token: Fence, step: int, error: OSError) -> None:
        """Record that a save failed. Raise unless a newer group exists."""
        if self._is_newest(token):
            raise AssertionError(f"the save of step {step} by {token} failed: {error}") from error

    def log(self, token: Fence, step: int) -> None:
        """Record that a group wrote the line of a step to storage."""
        if self._is_newest(token):
            self.logged.append((token, step))

    def _is_newest(self, token: Fence) -> bool:
        with self.schedule.unpaused():
            return token == self.run_dir.fence()

    def valid(self) -> list[Manifest]:
        """Return the checkpoints that verify now."""
        found = self.run_dir.manifests()
        return [one for step, one in found.items() if not verify(self.run_dir.checkpoint(step), one)]

    def check(self, changed: str) -> None:
        """Check the invariants of storage."""
        if changed == "fence":
            fence = self.run_dir.fence()
            assert fence >= self.fence, "the fence decreased"
            self.fence = fence
            return
        for one in self.run_dir.manifests().values() if self.known else ():
            newer = [token for token, known in self.known.items() if one.token < token and one.digest not in known]
            if newer and not verify(self.run_dir.checkpoint(one.step), one):
                raise AssertionError(f"{one.token} committed step {one.step} after {newer} had selected a checkpoint")

    def check_end(self) -> None:
        """Check the final state of storage against the recorded actions."""
        self.check("fence")
        self.check("checkpoints")
        steps = [one.step for one in self.valid()]
        assert max(steps, default=0) >= self.acknowledged, f"step {self.acknowledged} was committed, left are {steps}"
        counted = [(line["attempt"], line["epoch"], line["step"]) for line in self._lines()]
        assert len(counted) == len(set(counted)), "a line is counted twice"
        for token, step in self.logged:
            if token == self.fence:
                assert (token.attempt, token.epoch, step) in counted, f"step {step} of {token} is not counted"
        for attempt in self.run_dir.attempts():
            epochs = [line["epoch"] for line in read_lines(attempt.metrics)]
            assert epochs == sorted(epochs), "lines of two groups are mixed"

    def _lines(self) -> Iterator[dict[str, Any]]:
        for attempt in self.run_dir.attempts():
            yield from read_lines(attempt.metrics)


def group(world: World, attempt: int, number: int, steps: int) -> None:
    """Run a worker group until it has trained and saved some steps, or is superseded."""
    run_dir = RunDir(world.run_dir.root)
    with suppress(FencedError):
        if attempt > 1:
            # The service does the same before it submits an attempt.
            run_dir.write_fence(attempt)
        token = begin_group(run_dir, attempt, by=f"group {number}")
        try:
            train(world, token, number, steps)
        except OSError:
            # The successor has removed the checkpoint that this group was reading.
            assert token < run_dir.fence()


def train(world: World, token: Fence, number: int, steps: int) -> None:
    """Resume, then train and save some steps."""
    journal, ledger = group_journal(world.run_dir, token), open_store(world.run_dir, token)
    step = resume(world, ledger, token)
    world.select(token, step)
    for now in range(step + 1, step + 1 + steps):
        journal.metrics(step=now)
        journal.flush()
        world.log(token, now)
        save(world, ledger, journal, token, now, f"__0_{number:08x}_0.distcp")


def resume(world: World, ledger: CheckpointStore, token: Fence) -> int:
    """Select the newest checkpoint that verifies, in the order of `agree_on_newest`, which needs process groups."""
    check_fence(world.run_dir, token)
    for step in again(ledger.clear):
        again(partial(ledger.put_aside, step))
    world.record_listing(token)
    for step, one in sorted(world.run_dir.manifests().items(), reverse=True):
        if not verify(world.run_dir.checkpoint(step), one):
            return step
        again(partial(ledger.put_aside, step))
    return 0


def save(world: World, ledger: CheckpointStore, journal: EventLog, token: Fence, step: int, name: str) -> None:
    """Write files, commit, and remove older checkpoints, as `Saver` does."""

    def write_and_commit() -> None:
        check_fence(world.run_dir, token)
        folder = ledger.workplace(step)
        (folder / name).write_bytes(f"weights of {step} by {token}".encode())
        metadata = ledger.metadata_name()
        journal.flush()
        (folder / metadata).write_bytes(f"metadata of {step} by {token}".encode())
        files = {found: describe_file(folder / found) for found in (name, metadata)}
        draft = draft_of(step, attempt=token.attempt, epoch=token.epoch)
        ledger.commit(draft.model_copy(update={"files": files}))

    try:
        write_and_commit()
    except OSError as error:
        world.fail(token, step, error)
        with suppress(OSError):
            ledger.discard(step)
        return
    world.commit(token, step)
    with suppress(OSError):
        retire_others(world.run_dir, ledger, _SPEC)


def again(call: Callable[[], T]) -> T:
    """Retry once after a storage error: another group may have changed the listed files."""
    try:
        return call()
    except OSError:
        return call()


@pytest.fixture(params=["folders", "objects"])
def storage(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def new_world(storage: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Schedule], World]]:
    # Greenlets stay in their thread, and the lock of a paused holder blocks no greenlet.
    monkeypatch.setattr(manifest_module, "_check_each", lambda names, check: [check(name) for name in names])
    monkeypatch.setattr("train_loop.run_dir.segments.threading.Thread", Mock())
    monkeypatch.setattr(lines, "_LOCK_SECONDS", 0.0)
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="trainshed-fencing-", dir=memory if memory.is_dir() else None))

    def make(schedule: Schedule) -> World:
        segments._writers.clear()
        MemoryFileSystem.store.clear()
        shutil.rmtree(folder, ignore_errors=True)
        root = folder if storage == "folders" else cast("Path", ObjectPath("/runs/job"))
        world = World(RunDir(root), schedule)
        # A finished attempt committed this; retention removes it after the next save.
        checkpoint(world.run_dir, 1, attempt=0, weights=b"old")
        # That attempt died while saving the next step, which every group saves first.
        unfinished(world.run_dir, 2, attempt=0, rest=b"old")
        return world

    yield make
    shutil.rmtree(folder, ignore_errors=True)
    MemoryFileSystem.store.clear()
    segments._writers.clear()


def test_superseded_groups_paused_anywhere_never_commit_next_to_their_successor(
    storage: str, new_world: Callable[[Schedule], World]
) -> None:
    current: Schedule | None = None
    with paused_storage(lambda: current):
        for seed in range(SCHEDULES[storage]):
            current = Schedule(seed)
            world = new_world(current)
            groups = 3 if seed % 6 == 0 else 2
            attempts = [2 if number == groups - 1 and seed % 3 == 0 else 1 for number in range(groups)]
            steps = 2 if seed % 7 == 0 else 1
            programs = [partial(group, world, attempt, number, steps) for number, attempt in enumerate(attempts)]
            try:
                current.run(programs, watch=world.check)
                world.check_end()
            except Exception as error:
                current.running = False
                raise AssertionError(f"seed {seed}: {error}") from error
