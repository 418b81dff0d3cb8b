"""Crashes at any moment of a save, and damage of any kind: a resume uses a complete, committed checkpoint.

It is always the newest that verifies. A crash never loses a checkpoint that was reported as durable. A skipped
checkpoint is an event.
"""

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist

from tests.support.builders.searches import drawn, seeds
from tests.support.builders.specs import TINY, spec
from tests.support.faults.crashes import Op, Trace, states
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from train_loop import train
from train_loop.checkpoint import save
from train_loop.checkpoint.files import layout
from train_loop.checkpoint.save import Saver
from train_loop.checkpoint.state_dict import tensors_of
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import local_stream
from train_loop.loop.build import Run, build_run
from train_loop.loop.session import Session
from train_loop.run_dir import Fence, RunDir, is_remote, read_lines
from train_loop.telemetry.timers import StepTimer

SEED = 20261122
ENOUGH, DAMAGED = seeds(200, more=500), seeds(40, more=200)
"""Numbers of distinct states that crashes and damage leave; those of crashes depend on the commit.

Each of three missing fsyncs was found within the first 71.
"""


def a_run(folder: Path, run_dir: RunDir, attempt: int) -> Run:
    """Return a run of a very small model over all ranks."""
    job = spec(
        model={"config": TINY | {"vocab_size": 32, "num_hidden_layers": 1, "hidden_size": 16}, "dtype": "fp32"},
        data={"train": {"path": str(folder / "d.parquet")}, "columns": {"input_ids": "ids"}, "packing": False},
        checkpoint={"keep_last": 3},
        scaling={"num_workers": dist.get_world_size()},
    )
    session = Session(dist.get_rank(), dist.get_world_size(), 0, attempt, run_dir, local_stream)
    return build_run(job, session, find_dataset(job, folder))


def save_and_trace(folder: Path, attempt: int, steps: list[int]) -> list[Op]:
    """Make an attempt's saves as a run does; for a negative step, the save fails on the last rank."""
    run_dir = RunDir(folder / "run")
    run = a_run(folder, run_dir, attempt)
    run_dir.checkpoints.mkdir(parents=True, exist_ok=True)
    # Several files per rank, so that a crash can happen between them.
    layout.FILE_BYTES = 2**14
    save.PATIENCE = 0.0
    trace = Trace(run_dir.checkpoints)
    train.resume(run)
    saver = Saver(run.session.access, run.spec.checkpoint, "thread")
    for step in steps:
        run.state.step = run.state.consumed = abs(step)
        fill(run, abs(step))
        broken = step < 0 and dist.get_rank() == dist.get_world_size() - 1
        with pytest.MonkeyPatch.context() as patch:
            if broken:
                patch.setattr("os.writev", fail)
            train.save(run, saver, {}, StepTimer())
            fault = saver.wait()
        assert (fault is None) == (step > 0), fault
        if fault is None and dist.get_rank() == 0:
            trace.report_durable(step)
    return trace.ops


def fail(*_: object) -> int:
    raise OSError(5, "Input/output error")


def fill(run: Run, step: int) -> None:
    """Set every number of the state to its step."""
    for part in parts(run):
        for tensor in part.values():
            tensor.copy_(torch.full_like(tensor, step))


def parts(run: Run) -> list[dict[str, torch.Tensor]]:
    """Return the weights and their optimizer state."""
    state = tensors_of(run.state)
    return [state["model"], *state["optimizer"]["state"].values()]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Op]]]:
    """Return the disk operations of two attempts on two ranks, with a failing save and retention."""
    folder = tmp_path_factory.mktemp("traced")
    write_tokens(folder / "d.parquet", rows=64, length=32, vocab=32)
    first = on_ranks(2, save_and_trace, folder, 1, [1, 2, -3, 4])
    RunDir(folder / "run").write_fence(2)
    second = on_ranks(2, save_and_trace, folder, 2, [5, 6])
    assert len(list(RunDir(folder / "run").checkpoint(6).glob("*.distcp"))) > 2
    return folder, [*first, *second]


def test_disk_model_knows_all_written_files(traced: tuple[Path, list[list[Op]]], tmp_path: Path) -> None:
    folder, traces = traced
    *_, last = (state for state in states(traces, SEED) if state.kept == 1)
    last.make(tmp_path / "rebuilt")
    assert contents(tmp_path / "rebuilt") == contents(RunDir(folder / "run").checkpoints)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_resume_after_any_crash_and_damage_uses_the_newest_complete_checkpoint(
    traced: tuple[Path, list[list[Op]]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, traces = traced
    (outcomes,) = on_ranks(1, resume_all, folder, traces)
    with capsys.disabled():  # the proof includes the counts
        print("\n" + "\n".join(f"{count:5} {outcome}" for outcome, count in sorted(outcomes.items())))  # noqa: T201
    assert sum(count for outcome, count in outcomes.items() if outcome.startswith("crash")) >= ENOUGH
    assert {outcome.partition(":")[0] for outcome in outcomes} == {"crash", "damage"}


def resume_all(folder: Path, traces: list[list[Op]]) -> Counter[str]:
    """Resume from every state and count the outcomes. Raises AssertionError."""
    run = a_run(folder, RunDir(folder / "run"), 2)
    outcomes = Counter[str]()
    for state in drawn([*states(traces, SEED, at_least=ENOUGH)], ENOUGH):
        with TemporaryDirectory(dir=folder) as place:
            state.make(RunDir(Path(place)).checkpoints)
            reported = max(state.promised, default=0)
            outcomes["crash: " + resume(run, RunDir(Path(place)), state.name, reported=reported)] += 1
    for name, damage in damages(traced=RunDir(folder / "run")):
        with TemporaryDirectory(dir=folder) as place:
            shutil.copytree(RunDir(folder / "run").checkpoints, RunDir(Path(place)).checkpoints)
            damage(RunDir(Path(place)))
            outcomes["damage: " + resume(run, RunDir(Path(place)), name, reported=0)] += 1
    return outcomes


def resume(run: Run, run_dir: RunDir, name: str, *, reported: int) -> str:
    """Resume from the files of a run directory, check the result, and return the outcome."""
    whole = [step for step in range(1, 10) if is_whole(run_dir.checkpoint(step), step)]
    passed_over = {step for step in range(max(whole, default=0) + 1, 10) if claims(run_dir.checkpoint(step))}
    run.state.step = run.state.consumed = 0
    train.resume(replace(run, session=replace(run.session, run_dir=run_dir)))
    found, expected = run.state.step, max(whole, default=0)
    assert found == expected, f"{name}: step {found} was resumed, and step {expected} is the newest that is whole"
    assert found >= reported, f"{name}: step {reported} was reported as durable"
    if found:
        tensors = [tensor for part in parts(run) for tensor in part.values()]
        assert all((tensor == found).all() for tensor in tensors), f"{name}: step {found} was resumed with other values"
    events = [line["step"] for line in read_lines(run_dir.attempt(2).events) if line["event"] == "checkpoint_rejected"]
    assert passed_over <= set(events), f"{name}: {passed_over} were passed over, and {events} are events"
    assert not set(events) & set(whole), f"{name}: {events} are events, and {whole} were whole"
    return "from its start" if not found else "from an older one, with an event" if passed_over else "from the newest"


def claims(folder: Path) -> bool:
    """Return True if a folder claims to be a checkpoint: by its name, or on object storage by its manifest."""
    return (folder / "manifest.json").exists() if is_remote(folder) else folder.exists()


def is_whole(folder: Path, step: int) -> bool:
    """Return True if a folder is a checkpoint, without the code under test."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        rest = {name: value for name, value in manifest.items() if name != "digest"}
        sealed = hashlib.sha256(json.dumps(rest, separators=(",", ":")).encode()).hexdigest() == manifest["digest"]
        files = {name: file["sha256"] for name, file in manifest["files"].items()}
        same = all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha for name, sha in files.items())
        return sealed and same and manifest["step"] == step
    except (OSError, ValueError, KeyError):
        return False


def damages(traced: RunDir) -> Iterator[tuple[str, Callable[[RunDir], None]]]:
    """Yield seeded ways to damage one or several checkpoints of a run."""
    steps = sorted(traced.manifests())
    chance = random.Random(SEED)
    for number in range(DAMAGED):
        chosen = chance.sample(steps, chance.randint(1, len(steps)))
        kinds = [chance.choice(DAMAGES) for _ in chosen]

        def spoil(
            run_dir: RunDir, chosen: list[int] = chosen, kinds: list[Damage] = kinds, number: int = number
        ) -> None:
            for step, kind in zip(chosen, kinds, strict=True):
                kind(run_dir, step, random.Random(f"{number}/{step}"))

        yield f"damage {number}: {', '.join(f'{k.__name__} {s}' for k, s in zip(kinds, chosen, strict=True))}", spoil


Damage = Callable[[RunDir, int, random.Random], None]


def a_file(run_dir: RunDir, step: int, chance: random.Random) -> Path:
    return chance.choice(sorted(path for path in run_dir.checkpoint(step).iterdir() if path.stat().st_size))


def flip_a_bit(run_dir: RunDir, step: int, chance: random.Random) -> None:
    path = a_file(run_dir, step, chance)
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(run_dir: RunDir, step: int, chance: random.Random) -> None:
    path = a_file(run_dir, step, chance)
    os.truncate(path, chance.randrange(path.stat().st_size))


def zero_a_block(run_dir: RunDir, step: int, chance: random.Random) -> None:
    path = a_file(run_dir, step, chance)
    content = bytearray(path.read_bytes())
    start = chance.randrange(len(content))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)


def append(run_dir: RunDir, step: int, chance: random.Random) -> None:
    with a_file(run_dir, step, chance).open("ab") as file:
        file.write(chance.randbytes(10))


def remove_a_file(run_dir: RunDir, step: int, chance: random.Random) -> None:
    a_file(run_dir, step, chance).unlink()


def mix_in_a_file(run_dir: RunDir, step: int, chance: random.Random) -> None:
    """Replace a file with one of another step, and perhaps another attempt, under the expected name."""
    other = chance.choice([path for path in run_dir.checkpoints.iterdir() if path != run_dir.checkpoint(step)])
    path = a_file(run_dir, step, chance)
    same_kind = [file for file in sorted(other.iterdir()) if file.suffix == path.suffix]
    shutil.copy(chance.choice(same_kind or sorted(other.iterdir())), path)


def take_anothers_place(run_dir: RunDir, step: int, chance: random.Random) -> None:
    """Copy a complete checkpoint under the name of another step."""
    shutil.copytree(run_dir.checkpoint(step), run_dir.checkpoint(chance.randrange(7, 10)), dirs_exist_ok=True)


def leave_a_save_behind(run_dir: RunDir, step: int, chance: random.Random) -> None:
    run_dir.checkpoint(step).rename(run_dir.checkpoint_in_progress(step, Fence(chance.choice([1, 2]))))


def begin_to_retire(run_dir: RunDir, step: int, chance: random.Random) -> None:
    folder = run_dir.checkpoint(step)
    retired = folder.with_name(f"{folder.name}.retired")
    folder.rename(retired)
    for path in sorted(retired.iterdir(), key=lambda path: path.name != "manifest.json")[: chance.randrange(3)]:
        path.unlink()


DAMAGES: list[Damage] = [
    flip_a_bit,
    truncate,
    zero_a_block,
    append,
    remove_a_file,
    mix_in_a_file,
    take_anothers_place,
    leave_a_save_behind,
    begin_to_retire,
]
