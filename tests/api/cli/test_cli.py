"""The `trainshed` command against a listening service."""

import json
import re
import time
from datetime import datetime
from pathlib import Path

import pytest

from service.domain.access.roles import OPERATOR, AuditEntry, Key, Role
from service.domain.jobs.job import JobState
from tests.support.builders.checkpoints import checkpoint
from tests.support.clients.command import run
from tests.support.fakes.service import FakeService, spec_body
from train_loop.plan import Preview
from train_loop.run_dir import ExportStatus, ExportWish, Outcome
from trainshed import Client
from trainshed.cli.output.jobs import span
from trainshed.cli.output.printing import next_command


def test_clone_command_submits_a_job_with_changes(home: Path, service: FakeService) -> None:
    run("submit", str(home / "spec.json"))
    checkpoint(service.run_dir("job-0001"), 10, weights=b"1234567")
    changes = ("--set", "training.learning_rate=5e-4", "--set", "labels={team: nlp}", "--set", "training.max_steps=30")
    assert run("clone", "job-0001", *changes).stdout == "job-0002\n"
    job = service.get("job-0002")
    assert job.parent is not None
    assert (job.parent.step, job.spec.run.training.learning_rate, job.spec.run.training.max_steps) == (10, 5e-4, 30)
    assert job.spec.labels == {"team": "nlp"}
    assert "step 10 of job-0001" in run("show", "job-0002").stdout
    assert run("clone", "job-0001", "--set", "name=[1").stderr.startswith("trainshed: 'name=[1': the text is neither")
    for change in ("training", "=3", "training..seed=3", "name=[1"):
        refused = run("clone", "job-0001", "--set", change)
        assert (refused.exit_code, f"{change!r}" in refused.stderr.splitlines()[0]) == (2, True), refused.stderr


def test_job_commands_work_from_submit_to_cancel(home: Path, service: FakeService) -> None:
    assert run("submit", str(home / "spec.json")).stdout == "job-0001\n"
    service.reconciler().run_once()
    service.event("job-0001", "prepared", samples=3)
    moment = datetime(2026, 11, 27, 19, 8, 10).timestamp()
    service.event("job-0001", "storage_available", since=moment)
    service.event("job-0001", "exported", completed=moment)
    service.metric("job-0001", step=1, loss=2.0, rank_seconds=[0.123456789, 1.0])
    folder = service.run_dir("job-0001").attempt(1)
    folder.logs.mkdir(parents=True)
    folder.driver_log.write_text("[red]first line\n")
    assert "STARTING" in run("ps", "--state", "STARTING").stdout
    assert "file://" in run("show", "job-0001").stdout
    events = run("events", "job-0001").stdout
    assert "event=prepared samples=3" in events
    assert "event=storage_available since=2026-11-27T19:08:10" in events
    assert "event=exported completed=2026-11-27T19:08:10" in events
    assert "step=1 loss=2 rank_seconds=[0.123457, 1]" in run("metrics", "job-0001", "--lines").stdout
    assert run("logs", "job-0001").stdout == "[red]first line\n"
    assert "step" in run("checkpoints", "job-0001").stdout
    assert run("cancel", "job-0001", "--grace", "5", "--no-checkpoint").stdout == "job-0001 is CANCELLING\n"


DRIVER_LOG = """\
2026-11-27 01:02:03,456 INFO train_loop.data: preparing
2026-11-27 01:02:04,456 ERROR ray.data.exceptions: Exception occurred in Ray Data or Ray Core internal code. If you \
continue to see this error, please open an issue on the Ray project GitHub page with the full stack trace below: x
2026-11-27 01:02:04,457 ERROR ray.data.exceptions: Full stack trace:
Traceback (most recent call last):
  File "ray/data/exceptions.py", line 49, in handle_trace
ray.exceptions.RayTaskError(DataError): ray::Map() (pid=1)
2026-11-27 01:02:04,458 ERROR ray.streaming_executor_state.py:747: An exception was raised from a task of operator \
"Map". Dataset execution will now abort. To ignore this exception, set DataContext.max_errored_blocks.
2026-11-27 01:02:04,459 INFO ray.streaming_executor.py:371: Dataset dataset_1_0 execution failed
(raylet) A worker died or was killed. Consider enabling resource isolation via --enable-resource-isolation.
    - objects spillable: 1
2026-11-27 01:02:05,456 ERROR train_loop.ray_train.driver: the attempt failed: bad.jsonl, line 7: invalid JSON
ray.data.exceptions.SystemException

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train_loop/ray_train/driver.py", line 9, in run_attempt

The above exception was the direct cause of the following exception:

train_loop.errors.DataError: bad.jsonl, line 7: invalid JSON
a line that a library printed
2026-11-27 01:02:06,456 INFO train_loop.ray_train.driver: the end
"""


def test_logs_of_a_failed_job_begin_with_the_reason_and_leave_out_tracebacks(home: Path, service: FakeService) -> None:
    job_id = run("submit", str(home / "spec.json")).stdout.strip()
    service.reconciler().run_once()
    folder = service.run_dir(job_id).attempt(1)
    folder.logs.mkdir(parents=True)
    for log in (folder.driver_log, folder.rank_log(0)):
        log.write_text(DRIVER_LOG)
    lines = DRIVER_LOG.splitlines()
    records = [line for line in lines if line.startswith("2026") and " ray." not in line]
    assert run("logs", job_id).stdout.splitlines() == records, "expected no reason while the job runs"
    failure = {"code": "data_error", "reason": "bad.jsonl, line 7: invalid JSON", "retryable": False}
    service.end(job_id, Outcome(result="failed", **failure))
    service.reconciler().run_once()
    shown = run("logs", job_id)
    reason = f"{job_id} FAILED: data_error: bad.jsonl, line 7: invalid JSON"
    assert shown.stdout.splitlines() == [reason, "", *records]
    assert f"tracebacks of the driver: trainshed logs {job_id} --raw; of a rank: --rank N" in shown.stderr
    assert run("logs", job_id, "--follow").stdout.splitlines() == [reason, "", *records]
    assert run("logs", job_id, "--rank", "0").stdout.splitlines() == [reason, "", *lines]
    # As the driver has written it.
    assert run("logs", job_id, "--raw").stdout.splitlines() == lines
    assert json.loads(run("logs", job_id, "--json", "--raw").stdout)["data"] == lines
    assert json.loads(run("logs", job_id, "--json").stdout)["data"] == records
    # No page of any length shows a part of a traceback.
    for limit in range(1, len(records)):
        paged, page = list[str](), {"next": "1.0", "has_more": True}
        while page["has_more"]:
            page = json.loads(run("logs", job_id, "--json", f"--limit={limit}", f"--after={page['next']}").stdout)
            paged += page["data"]
        assert paged == records
    assert run("logs", job_id, "--contains", "the end").stdout.splitlines() == records[-1:]


def test_hint_below_a_runs_output_repeats_its_options_and_offers_no_follow_after_the_end(
    home: Path, service: FakeService
) -> None:
    job_id = run("submit", str(home / "spec.json")).stdout.strip()
    service.reconciler().run_once()
    folder = service.run_dir(job_id).attempt(1)
    folder.logs.mkdir(parents=True)
    folder.rank_log(1).write_text("one of them\ntwo of them\n")
    service.event(job_id, "prepared")
    given = "--attempt=1 --rank=1 --contains='of them'"

    def hint(command: str, *options: str) -> str:
        return run(*command.split(), *options).stderr.splitlines()[-1].removeprefix("next: trainshed ")

    logs = (f"logs {job_id} --rank 1 --attempt 1", "--contains", "of them")
    assert hint(*logs) == f"logs {job_id} {given} --follow"
    assert hint(*logs, "--limit", "1").startswith(f"logs {job_id} {given} --after ")
    assert hint(f"logs {job_id} --raw --level info --rank 1") == f"logs {job_id} --rank=1 --level=INFO --raw --follow"
    assert hint(f"events {job_id} --contains pre") == f"events {job_id} --contains=pre --follow"
    assert hint(f"metrics {job_id} --lines") == f"metrics {job_id} --lines --follow"
    service.end(job_id, Outcome(result="failed", code="data_error", reason="bad.jsonl, line 7", retryable=False))
    service.reconciler().run_once()
    ended = [hint(f"{name} {job_id}") for name in ("events", "logs", "metrics --lines")]
    assert ended == [f"logs {job_id}", f"clone {job_id}", f"logs {job_id}"]
    assert hint(*logs) == f"clone {job_id}"


def test_control_characters_are_shown_escaped(home: Path, service: FakeService) -> None:
    service.submit()
    service.reconciler().run_once()
    raw, escaped = "a\x1b]0;PWNED\x07\x9b\u202e\u2028b", r"a\x1b]0;PWNED\x07\x9b\u202e\u2028b"
    service.event("job-0001", "rows_skipped", file=raw)
    folder = service.run_dir("job-0001").attempt(1)
    folder.logs.mkdir(parents=True)
    folder.driver_log.write_text(f"{raw}\n")
    deed = AuditEntry(1.0, OPERATOR, "key.create", "default", "key-1")
    service.keys.add(Key("key-1", raw, {"default": Role.VIEWER}, "0" * 64, 1.0, "operator"), deed)
    for command in (("events", "job-0001"), ("logs", "job-0001"), ("keys", "ls")):
        shown = run(*command).stdout
        assert escaped in shown, command
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]", shown), command
        document = run(*command, "--json").stdout
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]", document), command
        assert raw in json.dumps(json.loads(document), ensure_ascii=False).replace("\\u001b", "\x1b").replace(
            "\\u0007", "\x07"
        )


@pytest.mark.slow
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
    done = ExportStatus(step=20, wish=wish, state="done", time=service.clock(), difference=0.25)
    service.run_dir(job_id).exports.folder(20, wish).mkdir()
    service.run_dir(job_id).exports.write(done)
    for dtype in ("bf16", "torch.bfloat16"):
        exported = run("export", job_id, "20", "--dtype", dtype)
        assert exported.stdout.strip().endswith("/export/step-00000020-model-bf16")
        assert "differ from those of the model with adapters by at most 0.25" in exported.stderr
    wrong = run("export", job_id, "20", "--dtype", "int8")
    assert (wrong.exit_code, "'int8' is not one of 'bf16', 'fp16', 'fp32'" in wrong.stderr) == (2, True)
    (folder / "weights").write_bytes(b"abd")
    damaged = run("verify", job_id, "20")
    assert (damaged.exit_code, damaged.stdout) == (
        1,
        "the checkpoint of step 20 is damaged; a run resumes from the one before it\n"
        "weights has another SHA-256 than when it was committed\n",
    )


def test_json_output_is_the_answer_of_the_service(home: Path) -> None:
    job = json.loads(run("submit", "-", "--json", "--idempotency-key", "k", stdin=spec_body()).stdout)
    assert json.loads(run("show", job["id"], "--json").stdout) == job
    assert json.loads(run("ps", "--json").stdout)["data"] == [job]
    for command in ("events", "metrics", "logs", "checkpoints"):
        assert json.loads(run(command, job["id"], "--json").stdout)["data"] == []


def test_plan_names_mesh_and_warnings(home: Path) -> None:
    output = run("plan", "-", stdin=spec_body(scaling={"num_workers": 99})).stdout
    assert "fsdp 99, ulysses 1" in output
    assert "warning: the job would stay QUEUED: 99 workers need 99 CPU" in output
    assert re.search(r"a checkpoint +1\.6 MiB", output), output


def test_plan_shows_what_was_written_and_the_setting_that_ends_the_run(home: Path) -> None:
    body = spec_body(training={"learning_rate": "1e-3"}, strategy={"sharding_strategy": "SHARD_GRAD_OP"})
    output = run("plan", "-", stdin=body).stdout
    assert 'read as: training.learning_rate: "1e-3" -> training.learning_rate: 0.001' in output
    assert '-> strategy.sharding_strategy: "FULL_SHARD", strategy.reshard_after_forward: false' in output
    assert "ends by  max_steps" in output


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        ((None, None), None),
        ((False, None), "documents  begin without a BOS token"),
        ((True, True), "documents  begin with the tokenizer's BOS token"),
        ((True, False), "documents  of a begin with the tokenizer's BOS token, all others without one"),
    ],
)
def test_plan_says_in_words_how_documents_begin(
    home: Path, service: FakeService, begin: tuple[bool | None, ...], expected: str | None
) -> None:
    service.preflight.preview = tuple(
        Preview(name, 1, 0, 0, 0, "drop", begins_with_bos=one) for name, one in zip("ab", begin, strict=True)
    )
    facts = [line.strip() for line in run("plan", "-", stdin=spec_body()).stdout.splitlines()]
    assert [line for line in facts if line.startswith("documents")] == ([expected] if expected else [])


def test_show_names_the_mesh_of_the_job_at_its_size(home: Path) -> None:
    strategy = {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}
    parts = {"scaling": {"num_workers": 8, "resources_per_worker": {"CPU": 0.5}}, "strategy": strategy}
    run("submit", "-", stdin=spec_body(**parts))
    shown, planned = (run(*command, stdin=spec_body(**parts)).stdout for command in (("show", "last"), ("plan", "-")))
    for line in ("mesh  ddp 2, fsdp 2, tp 2, ulysses 1\n", "mesh of experts  efsdp 1, ep 4\n"):
        assert line in shown
        assert line in planned


def test_submit_prints_each_warning_of_the_plan_once(home: Path, service: FakeService) -> None:
    service.preflight.preview = tuple(Preview(name, 1, 1, 0, 0, "drop", notes=(f"{name} is bad",)) for name in "ab")
    planned, submitted = (
        run(command, "-", stdin=spec_body(scaling={"num_workers": 99})).output for command in ("plan", "submit")
    )
    for warning in ("warning: the job would stay QUEUED: 99 workers", "warning: a is bad", "warning: b is bad"):
        assert (planned.count(warning), submitted.count(warning)) == (1, 1)


def test_key_commands_work_from_create_to_revoke(
    home: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "trainshed: key 'alice' lacks the role editor in project 'default'; ask an admin of the project for it\n",
    )
    monkeypatch.delenv("TRAINSHED_KEY")
    assert run("keys", "revoke", "key-0001").stdout == "revoked key-0001\n"
    monkeypatch.setenv("TRAINSHED_KEY", made.stdout.strip())
    assert "unknown, expired or revoked key" in run("whoami").stderr


def test_submit_command_applies_changes(home: Path, service: FakeService) -> None:
    run(
        "submit", "-", "--set", "training.max_steps=7", "--set", "labels.team=nlp", stdin=spec_body(labels={"by": "me"})
    )
    spec = service.get("job-0001").spec
    assert (spec.run.training.max_steps, spec.labels) == (7, {"by": "me", "team": "nlp"})
    refused = run("submit", str(home / "spec.json"), "--set", "seed=1", "--set", "training.max_steps=soon")
    assert (refused.exit_code, refused.stderr) == (
        1,
        "trainshed: 2 things are wrong:\n"
        '  /training/max_steps: input should be a valid integer; the value is "soon" (--set training.max_steps=soon)\n'
        "  /seed: no such field here; did you mean data.seed or training.seed? (--set seed=1)\n",
    )
    for text, why in (("[1]", "a job spec is a mapping of fields, not a list"), ("a: [", "is neither YAML nor JSON")):
        refused = run("submit", "-", "--set", "name=a", stdin=text)
        assert (refused.exit_code, why in refused.stderr) == (2, True), refused.stderr


def test_ps_shows_all_pages(home: Path, service: FakeService) -> None:
    ids = [service.submit(name=name).id for name in ("a", "b", "c")]
    service.clock.now = time.time()
    first = run("ps", "--limit", "2")
    assert first.stderr == "next: trainshed ps --after job-0002 (or --all)\n"
    assert [line.split()[0] for line in first.stdout.splitlines()] == ["id", "job-0003", "job-0002"]
    assert "job-0001" in run("ps", "--limit", "2", "--after", "job-0002").stdout
    found = json.loads(run("ps", "--limit", "1", "--all", "--json").stdout)
    assert ([job["id"] for job in found["data"]], found["has_more"], found["next"]) == (ids[::-1], False, None)
    assert run("ps", "--name", "none").stderr == "next: trainshed submit FILE\n"


def test_metrics_command_draws_sparklines(home: Path, service: FakeService) -> None:
    job_id = service.submit().id
    assert run("metrics", job_id).stdout == "no step is logged yet\n"
    for step in (1, 2, 3, 2, 3):
        service.metric(job_id, step=step, loss=4.0 - step, lr=1e-3)
    assert run("metrics", job_id).stdout == (
        "steps 1 to 3\n         loss  █▅▁  3 → 1\nlearning rate  ▁▁▁  0.001 → 0.001\n"
    )


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "0s"), (59, "59s"), (61, "1m1s"), (7200, "2h"), (90061, "1d1h"), (-5, "0s")]
)
def test_span_has_at_most_two_units(seconds: float, expected: str) -> None:
    assert span(seconds) == expected


def test_every_state_has_a_next_command(home: Path, service: FakeService) -> None:
    job = service.submit()
    with Client() as client:
        found = client.api.job(job.id)
    commands = {state: next_command(found.model_copy(update={"state": state})) for state in JobState}
    assert commands[JobState.PAUSED] == f"resume {job.id}"
    assert all(job.id in command for command in commands.values())
