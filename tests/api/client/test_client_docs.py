"""Examples of docs/guides/client.md, run from top to bottom."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.domain.jobs.job import Job, JobState
from tests.support.builders.checkpoints import checkpoint
from tests.support.fakes.service import KEY, FakeService
from tests.support.servers.serving import serving
from train_loop.run_dir import ExportStatus, ExportWish, Outcome

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "client.md"


@pytest.fixture
def cluster(service: FakeService) -> Iterator[None]:
    """Run the reconciler and act as the drivers."""
    leave = threading.Event()

    def work() -> None:
        while not leave.wait(0.05):
            service.reconciler().run_once()
            for job in map(service.get, service.store.active()):
                _drive(service, job)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    assert thread.is_alive()
    leave.set()
    thread.join()


def _drive(service: FakeService, job: Job) -> None:
    """Act as the driver of a job."""
    if not job.attempts or service.run_dir(job.id).attempt(job.attempts[-1].number).outcome_file.exists():
        return
    if job.state is JobState.STARTING and job.parent is None:
        _train(service, job.id)
    elif job.state is JobState.PAUSING:
        service.end(job.id, Outcome(result="paused"), attempt=job.attempts[-1].number)
    elif job.state is JobState.CANCELLING:
        service.end(job.id, Outcome(result="cancelled"), attempt=job.attempts[-1].number)


def _train(service: FakeService, job_id: str) -> None:
    folder, wish = service.run_dir(job_id), ExportWish(dtype="bf16")
    folder.attempt(1).logs.mkdir(parents=True, exist_ok=True)
    folder.attempt(1).driver_log.write_text("begin\nend\n")
    folder.attempt(1).rank_log(1).write_text("step 1\n")
    service.event(job_id, "prepared")
    for step in (1, 2):
        service.metric(job_id, step=step, loss=1.0 / step)
    checkpoint(folder, 10, weights=b"abc")
    folder.exports.folder(10, wish).mkdir(parents=True)
    folder.exports.write(ExportStatus(step=10, wish=wish, state="done", time=service.clock()))
    service.end(job_id, Outcome(result="succeeded"))


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("cluster")
def test_client_docs_examples_run(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    with serving(service.app()) as port:
        monkeypatch.setenv("TRAINSHED_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("TRAINSHED_KEY", KEY)
        names: dict[str, object] = {}
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), names)
    output = capsys.readouterr().out
    assert names["losses"] == [1.0, 0.5]
    assert "begin\nend\njob-0001 SUCCEEDED" in output
    assert "['key.revoke', 'key.create', 'job.delete'" in output
    assert "404 job_not_found job job-none not found" in output
