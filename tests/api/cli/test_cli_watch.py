"""Commands that follow a running job: watch, --wait, --follow, and Ctrl-C."""

import io
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from service.api.convert import job_out
from service.api.schemas import JobOut, ReasonOut
from service.domain.jobs.job import JobState
from service.domain.jobs.observation import SubmissionStatus
from service.domain.jobs.reason import Code
from tests.support.clients.command import run, running
from tests.support.fakes.service import KEY, FakeService
from train_loop.run_dir import Outcome
from trainshed import Client
from trainshed.cli.ids import shorten
from trainshed.cli.output import printing
from trainshed.cli.output.jobs import pace_of, show_jobs
from trainshed.cli.output.progress import display


@pytest.fixture
def job_id(home: Path, service: FakeService) -> str:
    return service.submit().id


def step(service: FakeService, job_id: str) -> None:
    """Start the job and log a step."""
    service.reconciler().run_once()
    service.cluster.submissions[f"{job_id}-1"] = SubmissionStatus.RUNNING
    service.event(job_id, "training_started", resumed_from=0, steps=20)
    service.metric(job_id, step=5, loss=2.5, tokens_per_second=1234.0)
    service.reconciler().run_once()


def end(service: FakeService, job_id: str, outcome: Outcome) -> None:
    service.end(job_id, outcome)
    service.cluster.submissions[f"{job_id}-1"] = SubmissionStatus.SUCCEEDED
    service.reconciler().run_once()


def read(process: subprocess.Popen[str], text: str) -> str:
    """Return the first line of stdout that contains `text`."""
    assert process.stdout is not None
    return next(line for line in process.stdout if text in line)


def test_watch_prints_changes_and_ends_with_the_job(job_id: str, service: FakeService) -> None:
    with running("watch", "0001") as process:
        assert "tiny  QUEUED" in read(process, job_id)
        step(service, job_id)
        assert "5/20 loss 2.5000  1,234 tok/s" in read(process, "RUNNING")
        end(service, job_id, Outcome(result="succeeded", step=20))
        read(process, "SUCCEEDED")
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == f"next: trainshed checkpoints {job_id}\n"


@pytest.mark.slow
def test_watch_without_names_ends_when_no_job_is_active(job_id: str, service: FakeService) -> None:
    with running("watch", "--json") as process:
        assert json.loads(read(process, job_id))["state"] == "QUEUED"
        step(service, job_id)
        assert json.loads(read(process, "RUNNING"))["progress"]["step"] == 5
        end(service, job_id, Outcome(result="failed", reason="[it] broke"))
        assert json.loads(read(process, "FAILED"))["reason"]["message"] == "[it] broke"
        # Without names, the exit code does not depend on the jobs.
        assert process.wait(timeout=60) == 0
    assert run("watch").stderr == "next: trainshed ps\n"


def test_watch_for_a_state_that_is_not_reached_exits_3(job_id: str, service: FakeService) -> None:
    assert run("watch", job_id, "--until", "QUEUED").exit_code == 0
    with running("watch", job_id, "--until", "paused") as process:
        read(process, "QUEUED")
        step(service, job_id)
        end(service, job_id, Outcome(result="succeeded", step=20))
        assert process.wait(timeout=60) == 3
    assert run("watch", job_id, "--until", "RUNNING").exit_code == 0
    assert run("watch", job_id, "--until", "FAILED").exit_code == 3


def test_submit_with_wait_ends_with_the_job(home: Path, service: FakeService) -> None:
    with running("submit", str(home / "spec.json"), "--wait") as process:
        job_id = read(process, "job-").strip()
        step(service, job_id)
        end(service, job_id, Outcome(result="failed", reason="it broke"))
        assert process.wait(timeout=60) == 3
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read() == ""
        stderr = process.stderr.read()
    assert "FAILED  5/20 loss 2.5000  it broke" in stderr
    assert stderr.endswith(f"next: trainshed logs {job_id}\n")


def test_submit_with_wait_and_json_prints_the_ended_job(home: Path, service: FakeService) -> None:
    with (
        running("submit", str(home / "spec.json"), "--wait", "--json") as process,
        Client(json.loads((home / "service.json").read_text())["url"], KEY) as client,
    ):
        while not (jobs := client.api.jobs().data):
            pass
        client.api.cancel(jobs[0].id)
        service.reconciler().run_once()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out)["state"], err) == (3, "CANCELLED", "")


def test_ctrl_c_exits_130_and_does_not_stop_the_job(job_id: str, service: FakeService) -> None:
    service.event(job_id, "prepared")
    for command in ("watch", "events --follow"):
        with running(*command.split(), job_id) as process:
            read(process, "")
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, f"\nthe job continues; next: trainshed watch {job_id}\n")
    assert service.get(job_id).state == "QUEUED"


@pytest.mark.slow
def test_follow_prints_new_lines_until_the_end(job_id: str, service: FakeService) -> None:
    step(service, job_id)
    log = service.run_dir(job_id).attempt(1).driver_log
    log.parent.mkdir(parents=True)
    log.write_text("2026-11-23 20:00:00,000 INFO one\n")
    with running("logs", "-f", job_id) as process:
        read(process, "INFO one")
        with log.open("a") as more:
            more.write("2026-11-23 20:00:01,000 INFO [two]\n")
        read(process, "INFO [two]")
        end(service, job_id, Outcome(result="succeeded", step=20))
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, f"next: trainshed checkpoints {job_id}\n")
    assert json.loads(run("logs", "-f", job_id, "--contains", "two", "--json").stdout).endswith("INFO [two]")
    assert json.loads(run("metrics", "-f", job_id, "--json").stdout)["loss"] == 2.5
    assert "step=5 loss=2.5" in run("metrics", "-f", job_id).stdout


def test_watch_on_a_terminal_draws_progress_bars(job_id: str, home: Path, service: FakeService) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200, _environ={"TERM": "xterm"})
    other = service.submit(name="other", scaling={"num_workers": 999}).id
    step(service, job_id)
    with Client(json.loads((home / "service.json").read_text())["url"], KEY) as client:
        jobs = [client.api.job(job_id), client.api.job(other)]
    with display(console, as_json=False) as show:
        show(jobs)
        show(jobs)
    drawn = screen.getvalue()
    for part in (job_id, other, "RUNNING", "5/20 loss 2.5000", "1,234 tok/s", "━", "1. in the queue"):
        assert part in drawn


def test_watch_on_a_narrow_terminal_keeps_id_state_and_progress(job_id: str, service: FakeService) -> None:
    step(service, job_id)
    found = service.client().get(f"/jobs/{job_id}").json() | {"name": "a-name-that-is-long-enough"}
    job = JobOut.model_validate_json(json.dumps(found))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None, _environ={"TERM": "xterm"})
    with display(console, as_json=False) as show:
        show([job])
    lines = [
        line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).splitlines() if "RUNNING" in line
    ]
    assert lines
    for line in lines:
        assert len(line.strip("\r")) <= 80
        for part in (shorten([job_id])[0], "a-name-that-i…", "RUNNING", "5/20 loss 2.5000"):
            assert part in line


@pytest.mark.parametrize(
    "state", [JobState.QUEUED, JobState.STARTING, JobState.RECOVERING, JobState.PAUSED, JobState.PAUSING]
)
def test_job_that_does_not_train_has_no_pace(job_id: str, service: FakeService, state: JobState) -> None:
    step(service, job_id)
    stored = service.store.get(job_id)
    assert stored is not None
    found = job_out(service.jobs.view(replace(stored, state=state)), now=0.0)
    assert found.progress.step == 5
    assert bool(pace_of(found)) is (state is JobState.PAUSING), "the workers of a pausing job still train"


def test_resumed_job_has_no_pace_before_its_next_step(job_id: str, service: FakeService) -> None:
    step(service, job_id)
    service.event(job_id, "training_started", resumed_from=5, steps=20)
    service.reconciler().run_once()
    found = JobOut.model_validate_json(service.client().get(f"/jobs/{job_id}").text)
    assert (found.state, found.progress.step, pace_of(found)) == (JobState.RUNNING, 5, "")
    service.metric(job_id, step=6, loss=2.0, tokens_per_second=999.0)
    service.reconciler().run_once()
    assert pace_of(JobOut.model_validate_json(service.client().get(f"/jobs/{job_id}").text)) == "999 tok/s"


def test_own_code_without_tokens_has_no_rate_of_tokens(job_id: str, service: FakeService) -> None:
    step(service, job_id)
    for number in (6, 7):
        service.metric(job_id, step=number, loss=2.0, tokens_per_second=0.0, grad_norm=0.0)
    service.reconciler().run_once()
    assert service.client().get(f"/jobs/{job_id}").json()["progress"]["tokens_per_second"] is None
    shown = run("metrics", job_id, "--points", "2").stdout
    assert ("loss" in shown, "gradient norm" in shown, "tokens/s" in shown) == (True, True, True)
    only = service.submit().id
    service.reconciler().run_once()
    service.metric(only, step=1, loss=2.0, tokens_per_second=0.0, grad_norm=0.0)
    shown = run("metrics", only).stdout
    assert ("loss" in shown, "gradient norm" in shown, "tokens/s" in shown) == (True, True, False)


def test_ps_on_a_narrow_terminal_shows_the_whole_reason_below_the_job(
    service: FakeService, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = ReasonOut(
        code=Code.CAPACITY, message="waits for 1.5 CPU (1.5 of the cluster's 2 are in use) " * 3, remedy=None
    )
    job = JobOut.model_validate_json(service.client().get(f"/jobs/{job_id}").text)
    jobs = [job.model_copy(update={"reason": reason}), job.model_copy(update={"id": job.id[:-1] + "9"})]
    screen = io.StringIO()
    narrow = Console(file=screen, force_terminal=True, width=80, color_system=None, soft_wrap=True)
    monkeypatch.setattr(printing, "console", narrow)
    show_jobs(jobs)
    header, waiting, *wrapped, other = screen.getvalue().splitlines()
    assert (header.split()[-1], waiting.split()[3]) == ("reason", "QUEUED")
    assert "".join(line.strip() for line in wrapped).replace(" ", "") == reason.message.replace(" ", "")
    assert max(map(len, (header, waiting, *wrapped, other))) <= 80
    assert "…" not in screen.getvalue()


def test_closed_stdout_ends_the_command_without_an_error(job_id: str, service: FakeService) -> None:
    for number in range(500):
        service.event(job_id, "prepared", text="x" * 1000, number=number)
    with running("events", job_id, "--limit", "1000", "--json") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 1


def test_help_imports_no_heavy_library() -> None:
    """Check that the help imports no heavy library."""
    heavy = "{'fastapi', 'starlette', 'sqlalchemy', 'ray', 'torch', 'transformers', 'pyarrow'}"
    script = "from trainshed.cli.main import app; app(['--help'], standalone_mode=False); import sys"
    command = [sys.executable, "-c", f"{script}; print({heavy} & sys.modules.keys())"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    assert "130: interrupted; the job continues" in done.stdout
