"""The `trainshed` command against a service that listens."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from typer.testing import CliRunner, Result

from service.cli.main import app
from tests.support.checkpoints import checkpoint
from tests.support.service import KEY, FakeService, spec_body
from train_loop.run_dir import ExportStatus, ExportWish


@pytest.fixture
def url(service: FakeService) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(service.app(), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
def home(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home as a running service leaves it, and a terminal wide enough."""
    for name in ("TRAINSHED_URL", "TRAINSHED_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAINSHED_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "service.json").write_text(json.dumps({"url": url, "pid": 1}))
    (tmp_path / "admin.key").write_text(KEY + "\n")
    (tmp_path / "spec.json").write_text(spec_body())
    return tmp_path


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_a_clone_is_submitted_with_changes(home: Path, service: FakeService) -> None:
    run("submit", str(home / "spec.json"))
    checkpoint(service.run_dir("job-0001"), 10, weights=b"1234567")
    changes = ("--set", "training.learning_rate=5e-4", "--set", "labels={team: nlp}", "--set", "training.max_steps=30")
    assert run("clone", "job-0001", *changes).stdout == "job-0002\n"
    job = service.get("job-0002")
    assert job.parent is not None
    assert (job.parent.step, job.spec.training.learning_rate, job.spec.training.max_steps) == (10, 5e-4, 30)
    assert job.spec.labels == {"team": "nlp"}
    assert "step 10 of job-0001" in run("show", "job-0002").stdout
    for change in ("training", "=3", "training..seed=3", "name=[1"):
        refused = run("clone", "job-0001", "--set", change)
        assert (refused.exit_code, refused.stderr.startswith(f"trainshed: {change!r}")) == (2, True), refused.stderr


def test_a_job_from_submit_to_cancel(home: Path, service: FakeService) -> None:
    assert run("submit", str(home / "spec.json")).stdout == "job-0001\n"
    service.reconciler().run_once()
    service.event("job-0001", "prepared", samples=3)
    service.metric("job-0001", step=1, loss=2.0, rank_seconds=[0.123456789, 1.0])
    folder = service.run_dir("job-0001").attempt(1)
    folder.logs.mkdir(parents=True)
    folder.driver_log.write_text("[red]as it is\n")
    assert "STARTING" in run("ps", "--state", "STARTING").stdout
    assert "file://" in run("show", "job-0001").stdout
    assert "event=prepared samples=3" in run("events", "job-0001").stdout
    assert "step=1 loss=2 rank_seconds=[0.123457, 1]" in run("metrics", "job-0001", "--lines").stdout
    assert run("logs", "job-0001").stdout == "[red]as it is\n"
    assert "step" in run("checkpoints", "job-0001").stdout
    assert run("cancel", "job-0001", "--grace", "5", "--no-checkpoint").stdout == "job-0001 is CANCELLING\n"


def test_checkpoints_are_verified_pinned_and_exported(home: Path, service: FakeService) -> None:
    job_id = run("submit", str(home / "spec.json")).stdout.strip()
    job = service.get(job_id)
    service.run_dirs.prepare(job.run_dir, job.spec, job.size, attempt=1)
    folder = checkpoint(service.run_dir(job_id), 20, weights=b"abc")
    assert run("verify", job_id, "20").stdout == "the checkpoint of step 20 is whole\n"
    assert run("pin", job_id, "20").stdout == "the checkpoint of step 20 is pinned\n"
    assert "pinned" in run("checkpoints", job_id).stdout
    assert run("pin", job_id, "20", "--remove").stdout == "the checkpoint of step 20 is left to retention\n"
    failed = run("export", job_id, "20", "--dtype", "fp32")
    assert failed.exit_code == 1
    assert "trainshed: the export failed: [Errno 2] No such file or directory" in failed.stderr
    wish = ExportWish(dtype="bf16")
    done = ExportStatus(step=20, wish=wish, state="done", time=service.clock())
    service.run_dir(job_id).exports.folder(20, wish).mkdir()
    service.run_dir(job_id).exports.write(done)
    assert run("export", job_id, "20", "--dtype", "bf16").stdout.strip().endswith("/export/step-00000020-model-bf16")
    (folder / "weights").write_bytes(b"abd")
    damaged = run("verify", job_id, "20")
    assert (damaged.exit_code, damaged.stdout) == (
        1,
        "the checkpoint of step 20 is damaged; a run resumes from the one before it\n"
        "weights has another SHA-256 than when it was committed\n",
    )


def test_json_is_what_the_service_answered(home: Path) -> None:
    job = json.loads(run("submit", "-", "--json", "--idempotency-key", "k", stdin=spec_body()).stdout)
    assert json.loads(run("show", job["id"], "--json").stdout) == job
    assert json.loads(run("ps", "--json").stdout)["data"] == [job]
    for command in ("events", "metrics", "logs", "checkpoints"):
        assert json.loads(run(command, job["id"], "--json").stdout)["data"] == []


def test_plan_names_mesh_and_warnings(home: Path) -> None:
    said = run("plan", "-", stdin=spec_body(scaling={"num_workers": 99})).stdout
    assert "fsdp 99, ulysses 1" in said
    assert "warning: the job would stay QUEUED: 99 workers need 99 CPU" in said


def test_refusal_ends_with_the_reason_and_code_1(home: Path) -> None:
    answer = run("submit", "-", stdin=spec_body(strategy={"fsdp_size": 3}, scaling={"num_workers": 4}))
    assert answer.exit_code == 1
    assert "/strategy/fsdp_size: fsdp_size=3 does not divide the 4 workers" in answer.stderr


def test_environment_overrides_the_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSHED_KEY", "wrong")
    assert "this key opens nothing" in run("ps").stderr
    monkeypatch.setenv("TRAINSHED_URL", "http://127.0.0.1:9")
    assert "the service does not answer" in run("ps").stderr


def test_missing_key_and_missing_file_say_what_to_do(home: Path) -> None:
    assert "name a readable job spec" in run("submit", "nowhere.yaml").stderr
    (home / "admin.key").unlink()
    answer = run("ps")
    assert (answer.exit_code, "start the service first, or set TRAINSHED_KEY" in answer.stderr) == (1, True)


def test_keys_from_create_to_revoke(home: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run("keys", "create", "alice", "--role", "nlp=editor", "--role", "default=viewer", "--days", "30")
    assert (made.exit_code, made.stdout.count("\n")) == (0, 1), made.stderr
    assert made.stderr.startswith("key-0001; keep the line above")
    run("submit", str(home / "spec.json"))
    assert "key-0001" in run("keys", "ls").stdout
    assert "nlp=editor default=viewer" in run("keys", "ls").stdout
    assert "job.submit" in run("audit", "--limit", "1").stdout
    assert json.loads(run("audit", "--json", "--project", "default").stdout)["data"][0]["key_id"] == "operator"
    monkeypatch.setenv("TRAINSHED_KEY", made.stdout.strip())
    assert "nlp=editor default=viewer" in run("whoami").stdout
    assert "job-0001" in run("ps").stdout
    refused = run("cancel", "job-0001")
    assert (refused.exit_code, refused.stderr) == (
        1,
        "trainshed: key 'alice' is no editor of project 'default'; ask an admin of it for one\n",
    )
    monkeypatch.delenv("TRAINSHED_KEY")
    assert run("keys", "revoke", "key-0001").stdout == "key-0001 opens nothing any more\n"
    monkeypatch.setenv("TRAINSHED_KEY", made.stdout.strip())
    assert "opens nothing, or not any more" in run("whoami").stderr


@pytest.mark.parametrize("role", ["nlp", "nlp=owner", "=viewer", "N!=viewer"])
def test_a_key_that_makes_no_sense_is_not_made(home: Path, service: FakeService, role: str) -> None:
    refused = run("keys", "create", "alice", "--role", role)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("trainshed: roles/")
    assert refused.stderr.endswith("; write --role nlp=editor\n")
    assert service.keys.all() == []
