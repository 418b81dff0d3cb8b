"""Own code through kills, a pause at another size, and errors of the code: a long search, with MORE=1."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from service.domain.jobs.job import JobState
from tests.support.own_code import MODEL, ZOO, example_job, own_spec, plain_loop, write_example
from tests.support.servers.live import LiveService
from tests.support.waiting import wait_for
from train_loop.spec import ScalingSpec
from trainshed import ApiError

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif("MORE" not in os.environ, reason="takes minutes: `make more` runs it"),
]
STEPS = 24


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    service = LiveService(
        tmp_path_factory.mktemp("home"),
        environment={"TRAINSHED_ALLOW_CODE": "*", "TRAINSHED_PREFLIGHT_CPU_SECONDS": "10"},
        step_seconds=0.25,
    )
    try:
        service.start()
        (service.home / "data").mkdir(exist_ok=True)
        yield service
    finally:
        service.stop()


def test_kills_and_a_pause_do_not_change_the_run_and_a_changed_package_is_refused(service: LiveService) -> None:
    folder = service.home / "data" / "own"
    folder.mkdir()
    write_example(folder, ZOO)
    raw = example_job(folder, ZOO)
    raw["training"] |= {"num_train_epochs": None, "max_steps": STEPS, "eval_steps": STEPS, "ema_decay": 0.5}
    raw["scaling"]["resources_per_worker"] = {"CPU": 0.5}
    job_id = service.client.submit(yaml.safe_dump(raw)).id
    service.wait_for_step(job_id, 5)
    psutil.Process(service.events(job_id, "training_started")[-1]["workers"][1]["pid"]).kill()
    wait_for(lambda: service.events(job_id, "workers_lost"), "the loss")
    service.wait_for_step(job_id, 10)
    service.driver(job_id).kill()
    service.wait_for_step(job_id, 14)
    service.client.pause(job_id)
    service.wait_for_state(job_id, JobState.PAUSED)
    # A resume at another size checks the spec again, and the package with it.
    (folder / ZOO / "another.py").write_text("")
    with pytest.raises(ApiError, match=r"/code/sha256: .* has the SHA-256 .* now, and not"):
        service.client.resume(job_id, scaling=ScalingSpec(num_workers=1))
    (folder / ZOO / "another.py").unlink()
    service.client.resume(job_id, scaling=ScalingSpec(num_workers=1))
    service.wait_for_state(job_id, JobState.SUCCEEDED)
    found = {line["step"]: line for line in service.metrics(job_id)}
    losses, evaluation, _ = plain_loop(folder, ZOO, [found[step] for step in range(1, STEPS + 1)], raw)
    for line in service.metrics(job_id):
        assert line["loss"] == pytest.approx(losses[line["step"] - 1], rel=1e-5), line
    assert found[STEPS]["eval_loss"] == pytest.approx(evaluation, rel=1e-5)


LATE = """
calls = 0
def loss(model, batch):
    global calls
    calls += model.training and torch.is_grad_enabled() and not batch["y"].is_meta
    if calls == 3:
        FAULT
    return F.mse_loss"""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise ValueError('no')", "ValueError: no (mymodel.py, line 26, in loss)"),
        ("open('/absent')", "FileNotFoundError: [Errno 2] No such file or directory: '/absent' (mymodel.py, line 26"),
        ("{}['a']", "KeyError: 'a' (mymodel.py, line 26, in loss)"),
        ("sys.exit(0)", "SystemExit: 0 (mymodel.py, line 26, in loss)"),
    ],
)
def test_error_in_step_3_ends_the_job_at_once_with_file_and_line(
    service: LiveService, fault: str, message: str
) -> None:
    text = "import sys\n" + MODEL.replace(
        "\ndef loss(model, batch):\n    return F.mse_loss", LATE.replace("FAULT", fault)
    )
    job_id = service.client.submit(yaml.safe_dump(spec(service.home, text))).id
    job = service.wait_for_state(job_id, JobState.FAILED)
    assert job.reason is not None
    assert message in job.reason.message
    assert (len(job.attempts), len(service.events(job_id, "training_started"))) == (1, 1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("while True: pass", "took over 10 s of CPU time"),
        ("__import__('numpy').ones(10 * 2**30, 'i1')", "MiB of memory"),
        ("import os; os._exit(0)", "was ended by the code (exit code 0)"),
        ("open(f'/proc/{__import__(chr(111) + chr(115)).getppid()}/environ').read()", "Permission denied"),
    ],
)
def test_hostile_build_is_refused_at_submission(service: LiveService, build: str, message: str) -> None:
    text = MODEL.replace("return Model(**config)", f"{build}\n    return Model(**config)")
    with pytest.raises(ApiError) as caught:
        service.client.submit(yaml.safe_dump(spec(service.home, text)))
    (error,) = caught.value.problem.errors or []
    assert error.pointer == "/code/model"
    assert message in error.message


def spec(home: Path, text: str) -> dict[str, Any]:
    raw = own_spec(home / "data" / str(abs(hash(text))), text, scaling={"num_workers": 2})
    raw["scaling"]["resources_per_worker"] = {"CPU": 0.5}
    return raw
