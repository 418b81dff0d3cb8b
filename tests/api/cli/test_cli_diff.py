"""`trainshed diff`: two jobs with the same or different metrics and tensors."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from service.adapters.helper_processes.checkpoints import HelperTools
from tests.support.builders.tensors import digests_in_process, tensor_checkpoint
from tests.support.clients.command import run
from tests.support.fakes.service import FakeService

ONE, OTHER = "job-0001", "job-0002"
STEPS = 6
WEIGHTS = {f"layer{n:02d}": torch.arange(6.0).view(3, 2) + n for n in range(12)}
STATE = {"model": WEIGHTS, "optimizer": {"step": torch.tensor(6.0)}}


@pytest.fixture
def jobs(home: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> FakeService:
    """Return a service with two jobs that have computed the same bits, on different numbers of workers."""
    # In this process: the helper process imports torch for seconds. tests/api/test_checkpoints.py uses it.
    monkeypatch.setattr(HelperTools, "digests", digests_in_process)
    for workers in (1, 2):
        job = service.submit(scaling={"num_workers": workers})
        for step in range(1, STEPS + 1):
            measure(service, job.id, step)
        for step in (3, 6):
            tensor_checkpoint(service.run_dir(job.id), step, STATE)
    return service


def measure(service: FakeService, job: str, step: int, *, attempt: int = 1, **other: float) -> None:
    """Write the metrics line of a step, with some values changed."""
    values = {"loss": 5.0 + 1e-9 * step, "grad_norm": 1 / step, "tokens_per_second": float(hash(job) % 1000)}
    evaluated = {"eval_loss": 4.0} if step == 4 else {}
    service.metric(job, attempt=attempt, step=step, **values | evaluated | other)


def changed(weights: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    return STATE | {"model": WEIGHTS | weights}


def test_jobs_with_the_same_bits_are_identical(jobs: FakeService) -> None:
    done = run("diff", ONE, OTHER)
    assert (done.exit_code, done.stderr) == (0, f"next: trainshed metrics {ONE} --lines\n")
    digest = json.loads(run("diff", ONE, OTHER, "--json").stdout)["checkpoint"]["sha256"][0]
    assert done.stdout == f"identical: 6 steps, 13 tensors of step 6, sha256 {digest}\n"
    assert run("diff", ONE, OTHER, "--step", "3").stdout.startswith("identical: 3 steps, 13 tensors of step 3, sha256 ")


def test_repeated_step_counts_with_its_last_line(jobs: FakeService) -> None:
    measure(jobs, ONE, 5, attempt=2, loss=9.0)
    measure(jobs, ONE, 6, attempt=2)
    measure(jobs, ONE, 5, attempt=3)
    measure(jobs, ONE, 6, attempt=3)
    assert run("diff", ONE, OTHER).stdout.startswith("identical: 6 steps, ")
    measure(jobs, ONE, 5, attempt=4, loss=9.0)
    assert run("diff", ONE, OTHER).stdout.startswith("different: step 5 is the first: loss 9.0 and 5.000000005\n")


@pytest.mark.parametrize(
    ("step", "values", "text"),
    [
        (2, {"loss": 5.000000002000001}, "loss 5.000000002000001 and 5.000000002"),
        (3, {"grad_norm": 0.25, "loss": 5.0}, "loss 5.0 and 5.000000003, grad_norm 0.25 and 0.3333333333333333"),
        (4, {"eval_loss": 3.5}, "eval_loss 3.5 and 4.0"),
        (5, {"loss": float("nan")}, "loss none and 5.000000005"),
    ],
)
def test_first_step_that_differs_is_printed(jobs: FakeService, step: int, values: dict[str, float], text: str) -> None:
    for later in range(step, STEPS + 1):
        measure(jobs, ONE, later, attempt=2, **values)
    done = run("diff", ONE, OTHER)
    assert done.exit_code == 1
    first, second = done.stdout.splitlines()
    assert first.startswith(f"different: step {step} is the first: {text}")
    assert second.startswith("13 tensors of step 6 identical, sha256 ")
    before = run("diff", ONE, OTHER, "--step", "3")
    assert before.exit_code == (1 if step <= 3 else 0)


def test_tensors_that_differ_are_listed(jobs: FakeService) -> None:
    one_bit = {"layer03": WEIGHTS["layer03"].clone()}
    one_bit["layer03"].view(torch.int32)[2, 1] ^= 1
    for job in (ONE, OTHER):
        measure(jobs, job, 9)
    tensor_checkpoint(jobs.run_dir(ONE), 9, changed(one_bit))
    tensor_checkpoint(jobs.run_dir(OTHER), 9, STATE)
    done = run("diff", ONE, OTHER)
    assert (done.exit_code, done.stdout) == (
        1,
        "different: tensors; 7 steps identical\n1 of 13 tensors of step 9 different:\n  model.layer03\n",
    )
    assert run("diff", ONE, OTHER, "--step", "6").exit_code == 0


def test_first_ten_different_tensors_are_listed(jobs: FakeService) -> None:
    other = {name: value + 1 for name, value in WEIGHTS.items()} | {"layer00": WEIGHTS["layer00"].view(2, 3)}
    other["extra"] = torch.zeros(1)
    tensor_checkpoint(jobs.run_dir(ONE), 9, STATE)
    tensor_checkpoint(jobs.run_dir(OTHER), 9, changed(other))
    lines = run("diff", ONE, OTHER).stdout.splitlines()
    assert lines[1:4] == [
        "13 of 14 tensors of step 9 different:",
        "  model.extra: only job-0002 has it",
        "  model.layer00: float32 [3, 2] and float32 [2, 3]",
    ]
    assert lines[-1] == "  and 3 more (all with --json)"
    assert len(lines) == 2 + 10 + 1
    document = json.loads(run("diff", ONE, OTHER, "--json").stdout)
    assert document["identical"] is False
    assert len(document["checkpoint"]["different"]) == 13
    assert document["checkpoint"]["different"][0]["digests"][0] is None


def test_steps_outside_the_common_range_are_not_compared(jobs: FakeService) -> None:
    for step in (7, 8):
        measure(jobs, OTHER, step, loss=1.0)
    done = run("diff", ONE, OTHER)
    assert done.exit_code == 0
    assert done.stdout.startswith("identical: 6 steps, ")
    assert "2 steps of job-0002 not compared, outside steps 1 to 6\n" in done.stderr


def test_step_that_one_job_lacks_is_a_difference(jobs: FakeService) -> None:
    for job, step in ((ONE, 9), (OTHER, 8), (OTHER, 9)):
        measure(jobs, job, step)
    done = run("diff", ONE, OTHER)
    assert done.exit_code == 1
    assert done.stdout.startswith("different: step 8 is the first: only job-0002 has it\n")


def test_jobs_without_a_common_checkpoint_are_compared_by_metrics(jobs: FakeService) -> None:
    third = jobs.submit().id
    for step in (1, 2):
        measure(jobs, third, step)
    done = run("diff", ONE, third)
    assert (done.exit_code, done.stdout) == (0, "identical: 2 steps\n")
    assert "tensors were not compared: the jobs have no checkpoint in common\n" in done.stderr
    assert json.loads(run("diff", ONE, third, "--json").stdout)["checkpoint"] is None


def test_jobs_with_nothing_in_common_are_an_error(jobs: FakeService) -> None:
    done = run("diff", ONE, jobs.submit().id)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        "trainshed: nothing to compare: the jobs have no step and no checkpoint in common; "
        "see `trainshed metrics JOB --lines`\n"
    )


def test_step_without_a_checkpoint_is_an_error(jobs: FakeService) -> None:
    done = run("diff", ONE, OTHER, "--step", "5")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "checkpoint of step 5 of job-0001 not found" in done.stderr


def test_damaged_checkpoint_is_an_error(jobs: FakeService) -> None:
    file = next(jobs.run_dir(OTHER).checkpoint(6).glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = run("diff", ONE, OTHER)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "the checkpoint of step 6 of job-0002 is damaged" in done.stderr


def test_long_runs_are_compared_over_all_pages(home: Path, service: FakeService) -> None:
    for _ in range(2):
        job = service.submit().id
        service.run_dir(job).attempt(1).metrics.parent.mkdir(parents=True)
        lines = (json.dumps({"seq": n, "time": 0.0, "attempt": 1, "step": n, "loss": n / 7}) for n in range(1, 2501))
        service.run_dir(job).attempt(1).metrics.write_text("".join(f"{line}\n" for line in lines))
    assert run("diff", ONE, OTHER).stdout == "identical: 2500 steps\n"
    measure(service, OTHER, 2500)
    assert run("diff", ONE, OTHER).stdout.startswith("different: step 2500 is the first: loss 357.14")
