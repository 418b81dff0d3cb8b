"""A run resumed with other numbers of ranks (4 → 2 → 1 → 4 → 2) equals the run that stayed at one size.

In its first and its last attempt, two ranks share each layer.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_tensors, write_tokens
from train_loop.data.dataset import Rows
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.loop.session import Session
from train_loop.plan import MeshPlan
from train_loop.run_dir import RunDir, Stop, read_lines
from train_loop.train import train

SAMPLES, EPOCHS, BATCH = 21, 4, 8
STEPS = 11
"""Number of steps; the last step is short: 4 x 21 samples are ten batches of 8 and half a batch."""


@dataclass(frozen=True)
class Leg:
    """The part of a run between two changes of size: one attempt, in separate processes."""

    world: int
    fsdp_size: int
    sp: int
    mesh: dict[str, int]
    stops_at: int = STEPS
    """The last step of this leg; at STEPS the run ends normally."""
    checkpoint: bool = True
    """True if the leg stops with a checkpoint, False if the next leg must repeat its last steps."""
    tp: int = 1


ALONE = Leg(1, 0, 1, {"fsdp": 1, "sp": 1})
LEGS = (
    Leg(4, 0, 1, {"fsdp": 2, "tp": 2, "sp": 1}, stops_at=2, tp=2),
    Leg(2, 0, 2, {"fsdp": 2, "sp": 2}, stops_at=5),
    Leg(1, 0, 1, {"fsdp": 1, "sp": 1}, stops_at=8, checkpoint=False),
    Leg(4, 2, 2, {"ddp": 2, "fsdp": 2, "sp": 2}, stops_at=9),
    Leg(2, 0, 1, {"fsdp": 1, "tp": 2, "sp": 1}, tp=2),
)
STARTS = [0, 2, 5, 7, 9]
"""The third leg leaves the checkpoint of step 7 and an eighth step that no checkpoint contains."""


def train_leg(data: Path, folder: Path, attempt: int, leg: Leg) -> None:
    """Train one leg of the run in a folder, from its newest checkpoint."""
    job = spec(
        model={"config": TINY, "dtype": "fp32"},
        data={"train": {"path": str(data)}, "columns": {"input_ids": "ids"}, "packing": False, "shuffle": True}
        | {"eval": {"path": str(data)}},
        training={"max_steps": None, "num_train_epochs": EPOCHS, "global_batch_size": BATCH, "audit_samples": True}
        | {"per_device_train_batch_size": 2, "eval_steps": 5}
        # Clipping depends on all ranks, and the rate of each step on the number of steps.
        | {"max_grad_norm": 0.3, "weight_decay": 0.1, "ema_decay": 0.9, "lr_scheduler_type": "cosine"}
        # Adam divides a gradient by its own size: without a floor, the rounding of a gradient near zero
        # moves its weight by a part of a whole rate, and meshes round differently.
        | {"adam_epsilon": 1e-4},
        strategy={"fsdp_size": leg.fsdp_size, "ulysses_size": leg.sp, "tp_size": leg.tp},
        checkpoint={"every_steps": 7},
        scaling={"num_workers": leg.world},
    )
    run_dir = RunDir(folder)

    def stopped_stream(plan: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
        """Yield the rows of every step, and request a stop after the leg's last step."""
        for step, rows in enumerate(local_stream(plan, mesh, rank), start=plan.start // BATCH):
            if step == leg.stops_at and rank == 0:
                run_dir.write_stop(Stop(mode="resize", checkpoint=leg.checkpoint))
            yield rows

    session = Session(dist.get_rank(), dist.get_world_size(), 0, attempt, run_dir, stopped_stream)
    dataset = find_dataset(job, folder)
    outcome = train(job, session, dataset, evaluation=dataset)
    assert (outcome.result, outcome.step) == ("resized" if leg.stops_at < STEPS else "succeeded", leg.stops_at)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    # Rows shorter than the sequence, so that data ranks differ in the tokens they train.
    write_tokens(folder / "d.parquet", rows=SAMPLES, length=(9, 32), vocab=TINY["vocab_size"])
    on_ranks(1, train_leg, folder / "d.parquet", folder / "undisturbed", 1, ALONE)
    return folder / "undisturbed"


@pytest.fixture(scope="module")
def resized(undisturbed: Path) -> Path:
    folder = undisturbed.with_name("resized")
    for attempt, leg in enumerate(LEGS, start=1):
        RunDir(folder).write_fence(attempt)
        on_ranks(leg.world, train_leg, undisturbed.with_name("d.parquet"), folder, attempt, leg)
        # The stop request was obeyed: the next attempt must not stop.
        RunDir(folder).stop_file.unlink(missing_ok=True)
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics lines of all attempts, in the order in which they were written."""
    return [line for attempt in RunDir(folder).attempts() for line in read_lines(attempt.metrics)]


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the steps of the trained model: for a repeated step, the last repetition."""
    return list({line["step"]: line for line in lines(folder)}.values())


def test_every_leg_resumes_from_the_checkpoint_of_the_previous_leg(resized: Path) -> None:
    events = [event for attempt in RunDir(resized).attempts() for event in read_lines(attempt.events)]
    starts = [event for event in events if event["event"] == "training_started"]
    assert [start["mesh"] for start in starts] == [leg.mesh for leg in LEGS]
    assert [start["resumed_from"] for start in starts] == STARTS
    assert [start["replayed"] for start in starts] == [0, 0, 0, 1, 0]
    assert [start * BATCH % SAMPLES for start in STARTS] == [0, 16, 19, 14, 9], "expected a resume within an epoch"
    assert [start * BATCH // SAMPLES for start in STARTS] == [0, 0, 1, 2, 3], "expected resumes in different epochs"


def test_every_step_takes_the_samples_of_the_fixed_size_run(undisturbed: Path, resized: Path) -> None:
    expected = {line["step"]: line["samples"] for line in lines(undisturbed)}
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines(resized)] == [*range(1, 9), *range(8, STEPS + 1)]
    assert expected[1] != list(range(BATCH)), "expected shuffled samples"
    for line in lines(resized):
        assert line["samples"] == expected[line["step"]], f"step {line['step']} of attempt {line['attempt']}"


def test_no_sample_repeats_before_all_were_used(resized: Path) -> None:
    """Check that after p samples each was used p // 21 or p // 21 + 1 times: exactly once per epoch."""
    taken: Counter[int] = Counter()
    for line in history(resized):
        taken.update(line["samples"])
        epochs, more = divmod(taken.total(), SAMPLES)
        counts = Counter(taken[sample] for sample in range(SAMPLES))
        assert counts == Counter({epochs: SAMPLES - more, epochs + 1: more}), f"step {line['step']}"
    assert taken == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


def test_every_step_trains_as_in_the_fixed_size_run(undisturbed: Path, resized: Path) -> None:
    expected = {line["step"]: line for line in lines(undisturbed)}
    for line in lines(resized):
        one = expected[line["step"]]
        assert (line["tokens"], line["lr"]) == (one["tokens"], one["lr"])
        assert line["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert ("eval_loss" in line) == (line["step"] in (5, 10, STEPS))
        if "eval_loss" in line:
            assert line["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)


def test_final_weights_moments_and_average_equal_the_fixed_size_run(undisturbed: Path, resized: Path) -> None:
    expected, found = (load_tensors(folder, STEPS) for folder in (undisturbed, resized))
    assert {name.split("/")[1] for name in expected} == {"model", "optimizer", "ema"}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        off = (found[name] - value).norm() / value.norm().clamp(min=1e-12)
        assert off < 1e-5, name
