"""Jobs over HTTP on real Ray, with kills of every process."""

import email
import gzip
import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import yaml
from pydantic import JsonValue

from service.adapters.ray.head import read_head
from service.adapters.ray.jobs import RayJobs
from service.adapters.ray.session import RayAddress
from service.api.schemas import ExaminationOut, ExportIn, ExportOut, JobOut, ReasonOut
from service.domain.doctor.finding import Verdict
from service.domain.doctor.measurements import Reachability
from service.domain.jobs.job import JobState
from tests.support.adapters import ROWS as ADAPTER_ROWS
from tests.support.adapters import STEPS as ADAPTER_STEPS
from tests.support.adapters import adapters_job, outputs
from tests.support.builders.folders import write_tokenizer
from tests.support.builders.searches import drawn
from tests.support.builders.sinks import shown
from tests.support.builders.specs import TINY
from tests.support.faults.memory import memory_group
from tests.support.mixture import ROWS, loss_of_export, mixture_job
from tests.support.own_code import NAMES, example_job, plain_loop, write_example
from tests.support.ranks.torchrun import load_checkpoint, write_tokens
from tests.support.servers.live import LiveService, small_job
from tests.support.servers.s3 import S3Server, s3_server
from tests.support.text_heads import TEXT_HEADS
from tests.support.turns import turns
from tests.support.waiting import SERVICE_PAUSE, wait_for
from train_loop.checkpoint.manifest import newest_verified
from train_loop.data.read_results import read_rows
from train_loop.run_dir import local_path
from train_loop.spec import dump, override, parse_text
from trainshed import ApiError, Job

pytestmark = pytest.mark.timeout(400)
STEPS = 40
in_turn = turns(
    [
        *("conversations", "oom", "memory", "layers shared", "fewer layers shared", "other tool", "mixture", "clone"),
        *("link", "own code", "head", "short data", "weights of a job", "inference killed"),
        *("adapters", "chosen micro-batches"),
    ],
    2,
)
"""Of tests whose parts other files test, too, a commit runs some."""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        server.bucket("corpus")
        yield server


@pytest.fixture(scope="module")
def service(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    home = tmp_path_factory.mktemp("home")
    environment = s3.environment() | {"TRAINSHED_RAY_MEMORY_BYTES": str(3 << 30), "TRAINSHED_ALLOW_CODE": "own"}
    service = LiveService(home, environment=environment, roots=("s3://corpus/open",))
    try:
        service.start()
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="module")
def reference(service: LiveService) -> str:
    """Return a job that nothing disturbed but kills of its service: at once, while it started and while it ran."""
    job_id = service.submit(labels={"team": "tests"})
    # On a slow machine, it would end before the service is back.
    service.hold(job_id, 5)
    service.kill()
    service.start(quick=True)
    service.wait_for_state(job_id, JobState.STARTING, JobState.RUNNING)
    service.kill()
    service.start(quick=True)
    service.wait_for_state(job_id, JobState.RUNNING)
    service.kill()
    service.start()
    service.hold(job_id, None)
    service.wait_for_state(job_id, JobState.SUCCEEDED)
    return job_id


def test_doctor_finds_no_faults_and_leaves_nothing(service: LiveService) -> None:
    (service.home / "data").mkdir(exist_ok=True)
    # Embedded Ray takes some seconds to start.
    found = wait_for(lambda: well(service.client.doctor()), "a healthy service", seconds=240)
    assert {one.check for one in found.findings} >= {"storage.shared", "clock", "versions"}
    # An earlier check may have been given up.
    wait_for(lambda: not list((service.home / "runs").glob("_doctor*")), "a clean folder")
    head = read_head(service.home / "ray.json")
    assert head is not None
    stranger = RayAddress(head.dashboard_url or "", "not-the-token")
    assert RayJobs(lambda: stranger, python="python").greet().reach is Reachability.REFUSED


def well(found: ExaminationOut) -> ExaminationOut | None:
    verdicts = {one.verdict for one in found.findings if one.check != "data_cpus"}
    return found if verdicts == {Verdict.OK} else None


def assert_whole(service: LiveService, job_id: str, reference: str) -> None:
    """Check every step's samples, loss and norm, and the end, against the reference, despite repeated steps."""
    numbers = ("samples", "loss", "grad_norm", "tokens")
    expected = {line["step"]: [line[name] for name in numbers] for line in service.metrics(reference)}
    lines = service.metrics(job_id)
    assert {line["step"] for line in lines} == set(range(1, STEPS + 1))
    for line in lines:
        assert [line[name] for name in numbers] == expected[line["step"]], line
    newest, rejected = newest_verified(service.run_dir(job_id))
    assert newest is not None
    assert (newest.step, rejected) == (STEPS, {})
    whole, found = (load_checkpoint(service.run_dir(job).root, STEPS)["model"] for job in (reference, job_id))
    assert all(torch.equal(found[name], weight) for name, weight in whole.items())


def processes_of(job_id: str) -> list[psutil.Process]:
    """Return the processes that were started for a job."""
    return [p for p in psutil.process_iter(["cmdline"]) if job_id in " ".join(p.info["cmdline"] or [])]


# The test of killed workers compares this run's numbers with those of a run whose service was not killed.
def test_service_killed_while_a_job_is_queued_starting_and_running_does_not_disturb_it(
    service: LiveService, reference: str
) -> None:
    job = service.client.job(reference)
    assert (job.attempt, job.restarts) == (1, 0), "the run was disturbed by the service's death"
    assert len(service.events(reference, "attempt_started")) == 1
    assert [line["step"] for line in service.metrics(reference)] == list(range(1, STEPS + 1))
    newest, rejected = newest_verified(service.run_dir(reference))
    assert newest is not None
    assert (newest.step, rejected) == (STEPS, {})


@in_turn("conversations")
def test_conversations_on_s3_and_local_text_are_mixed_evaluated_and_end_by_tokens(
    service: LiveService, s3: S3Server
) -> None:
    folder = service.home / "data" / "chat"
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    talk = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is said."}]
    lines = [json.dumps({"messages": talk}), "no JSON"] * 40
    s3.put("corpus/open/talks/a.jsonl.gz", gzip.compress("\n".join(lines).encode()))
    talks = {"path": "s3://corpus/open/talks/", "columns": {"messages": "messages"}, "weight": 3}
    text = {"path": "stdlib://json/*.py", "weight": 1}
    data = {"columns": {"text": "text"}, "packing": True, "on_bad_rows": "skip", "system_prompt": "Be brief."}
    # Conversations are longer than the samples.
    data["on_long_rows"] = "split"
    model = {"tokenizer": folder.as_uri()}
    with pytest.raises(ApiError) as refused:
        service.submit(data=data | {"train": [{**talks, "path": "s3://corpus/closed/"}, text]}, model=model)
    assert [error.pointer for error in refused.value.problem.errors or []] == ["/data/train/0/path"]
    job_id = service.submit(
        data=data | {"train": [talks, text], "eval": {"path": "stdlib://json/tool.py"}},
        model=model,
        training={"max_steps": None, "max_tokens": 1000, "eval_steps": 5, "deterministic": True},
    )
    job = service.wait_for_state(job_id, JobState.SUCCEEDED)
    (skipped,) = service.events(job_id, "bad_rows_skipped")
    assert skipped["count"] == 40
    assert skipped["rows"][0].startswith("s3://corpus/open/talks/a.jsonl.gz, line 2: invalid JSON")
    (prepared,) = service.events(job_id, "prepared")
    (conversations, texts) = prepared["sources"]
    assert (conversations["path"], texts["path"]) == ("s3://corpus/open/talks/", "stdlib://json/*.py")
    assert (conversations["rows"], conversations["long_rows"], conversations["dropped_rows"]) == (80, 40, 0)
    assert texts["utilisation"] > 0.9
    trained = service.metrics(job_id)
    for line in trained:
        assert sum(sample < conversations["samples"] for sample in line["samples"]) == 3, (
            "expected counts of the 4 samples of a step"
        )
    assert trained[-2]["tokens"] < 1000 <= trained[-1]["tokens"]
    assert [line["step"] for line in trained if "eval_loss" in line] == [5, len(trained)]
    assert trained[-1]["eval_loss"] < trained[4]["eval_loss"]
    assert job.progress.of == len(trained)


def test_job_runs_to_its_end_and_its_traces_are_served(service: LiveService, reference: str) -> None:
    lines = service.metrics(reference)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    samples = [sample for line in lines for sample in line["samples"]]
    assert sorted(samples) == sorted(set(samples)), "a sample was repeated within an epoch"
    job = service.client.job(reference)
    assert (job.attempt, job.restarts, job.lost_work.steps) == (1, 0, 0)
    assert (job.progress.step, job.progress.of, job.progress.percent) == (STEPS, STEPS, 100.0)
    assert [c.step for c in service.client.checkpoints(job.id).data] == [30, 40]
    page = service.client.metrics(job.id, limit=STEPS)
    assert page.data == lines
    log = service.client.logs(job.id, rank=1, limit=1000)
    assert log.data, "the log of rank 1 is missing"
    losses = shown_at_last(service, job.id)
    assert losses == pytest.approx([line["loss"] for line in lines])
    assert job.dashboard_url is not None
    assert job.dashboard_url.endswith(f"/#/jobs/{job.id}-1")


def test_ray_dashboard_names_the_attempt_and_shows_its_train_run(service: LiveService, reference: str) -> None:
    job, head = service.client.job(reference), read_head(service.home / "ray.json")
    assert head is not None
    token = (service.home / "ray.token").read_text().strip()
    name, run_name = f"{job.name} ({job.id})", f"{job.name} ({job.id}-1)"
    with httpx.Client(
        base_url=head.dashboard_url or "", headers={"authorization": f"Bearer {token}"}, timeout=60
    ) as ray:
        submission = ray.get(f"/api/jobs/{job.id}-1").json()
        runs = ray.get("/api/train/v2/runs/v1").json()["train_runs"]
    metadata = {"job_id": job.id, "attempt": "1", "project": job.project, "label.team": "tests"}
    assert submission["metadata"] == {"name": name, "job_name": name, **metadata}
    assert job.dashboard_url == f"{head.dashboard_url}/#/jobs/{submission['submission_id']}"
    assert [run["status"] for run in runs if run["name"] == run_name] == ["FINISHED"]
    exported = Path(head.temp_dir) / "r" / "session_latest" / "logs" / "export_events"
    assert any(run_name in path.read_text() for path in exported.glob("event_EXPORT_TRAIN_STATE*"))


def shown_at_last(service: LiveService, job_id: str) -> list[float]:
    """Return the losses of all steps in TensorBoard's files, once they are there: an outcome may appear before."""
    folder = service.run_dir(job_id).tensorboard

    def losses() -> list[float]:
        # Without any step, there is no such tag.
        with suppress(KeyError):
            steps, losses = zip(*shown(folder), strict=True)
            return list(losses) if steps == tuple(range(1, STEPS + 1)) else []
        return []

    return wait_for(losses, "all steps in TensorBoard")


def listen_addresses(process: psutil.Process) -> set[str]:
    listening = [one for one in process.net_connections(kind="tcp") if one.status == psutil.CONN_LISTEN]
    return {one.laddr[0].removeprefix("::ffff:") for one in listening}


def test_killed_workers_and_driver_do_not_change_the_run(service: LiveService, reference: str) -> None:
    """Kill one worker, all workers, then the driver, at random steps: two restarts, then a second attempt."""
    chance, job_id = random.Random(7), service.submit()

    def workers_at(step: int) -> list[psutil.Process]:
        # Without it, the job could go on and end before the kill.
        service.hold(job_id, step)
        service.wait_for_step(job_id, step)
        newest = service.events(job_id, "training_started")[-1]
        workers = [psutil.Process(worker["pid"]) for worker in newest["workers"]]
        # Neither the store of the group nor gloo may be reached from other hosts.
        assert {ip for worker in workers for ip in listen_addresses(worker)} == {"127.0.0.1"}
        return workers

    def wait_for_start(number: int) -> None:
        wait_for(lambda: service.events(job_id, "training_started")[number - 1 :], f"start {number}")
        service.wait_for_state(job_id, JobState.RUNNING)

    chance.choice(workers_at(chance.randint(13, 17))).kill()
    wait_for_start(2)
    for worker in workers_at(chance.randint(23, 27)):
        worker.kill()
    wait_for_start(3)
    assert service.client.job(job_id).attempt == 1
    workers_at(chance.randint(33, 36))
    service.driver(job_id).kill()
    service.hold(job_id, None)
    job = service.wait_for_state(job_id, JobState.SUCCEEDED)
    assert [attempt.result for attempt in job.attempts] == ["failed", "succeeded"]
    starts = service.events(job_id, "training_started")
    assert all(start["resumed_from"] > 0 for start in starts[1:])
    assert (job.restarts, job.lost_work.steps) == (3, sum(start["replayed"] for start in starts))
    # Over two drivers, of which one was killed.
    shown_at_last(service, job_id)
    assert_whole(service, job_id, reference)


@in_turn("oom")
def test_job_with_an_oom_killed_rank_is_retried_once(service: LiveService) -> None:
    job_id = service.submit(
        training={"max_steps": 100_000}, checkpoint={"every_steps": None}, scaling={"num_workers": 2}
    )

    def wait_for_event(name: str, number: int) -> Any:
        found = wait_for(lambda: service.events(job_id, name)[number - 1 :], f"{name} {number}", seconds=120)
        return found[0]

    def wait_for_beats(rank: psutil.Process, number: int) -> None:
        """Wait until the rank's heartbeat process has looked again which group the rank is in. It sleeps between."""
        (sender,) = wait_for(lambda: [one for one in rank.children() if one.name() == "heartbeat"], "its heartbeats")
        before = sender.num_ctx_switches().voluntary
        wait_for(lambda: sender.num_ctx_switches().voluntary >= before + number, "heartbeats")

    try:
        for start in (1, 2):
            with memory_group() as group:
                rank = psutil.Process(wait_for_event("training_started", start)["workers"][1]["pid"])
                group.add(rank.pid)
                wait_for_beats(rank, 3)
                group.allow(2**16)
                wait_for_event("out_of_memory", start)
                wait_for_event("workers_lost", start)
        job = service.wait_for_state(job_id, JobState.FAILED)
    finally:
        if not service.client.job(job_id).state.terminal:
            service.client.cancel(job_id)
    assert job.reason is not None
    assert job.reason.code == "out_of_memory"
    assert "two worker groups ran out of memory" in job.reason.message
    assert "rank 1 on " in job.reason.message
    assert "was killed by the kernel because its host or container ran out of memory" in job.reason.message
    assert "remedies, cheapest first: failure.spare_workers: false" in job.reason.message
    assert {loss["cause"] for loss in service.events(job_id, "workers_lost")} == {"out_of_memory"}
    assert len(service.events(job_id, "training_started")) == 2


@in_turn("memory")
def test_rank_beyond_the_memory_it_reserved_fails_while_the_service_answers_and_another_job_waits(
    service: LiveService,
) -> None:
    # The logits of a step are one allocation of 3.3 GB, which the plan estimates and does not refuse.
    vocabulary, batch, alone = 400_000, 64, {"num_workers": 1, "resources_per_worker": {"CPU": 0.5}}
    job_id = service.submit(
        model={"config": TINY | {"vocab_size": vocabulary, "tie_word_embeddings": True}},
        training={"max_steps": 2, "chunked_loss": False, "optimizer": "adafactor"}
        | {"global_batch_size": batch, "per_device_train_batch_size": batch},
        strategy={"ulysses_size": 1, "async_save_ckpt": False},
        scaling=alone,
    )
    # The waiting job trains embeddings, which therefore need no other job.
    other = service.submit(**TEXT_HEADS["embedding"].write(service.home / "data" / "embedding"), scaling=alone)
    seen = list[ReasonOut]()
    while not (job := service.client.job(job_id)).state.terminal:
        assert httpx.get(f"{service.url}/healthz", timeout=30).status_code == 200
        seen += [reason] if (reason := service.client.job(other).reason) is not None else []
        assert not service.client.job(other).attempts or service.client.job(job_id).state.terminal
        time.sleep(0.2)
    waits = [one.message for one in seen if one.code == "capacity"]
    assert any(
        one.startswith("next in the queue; waits for ")
        and one.endswith(" of memory (2.9 GiB of the cluster's 3.0 GiB are reserved)")
        for one in waits
    ), seen
    assert job.reason is not None
    assert (job.state, job.reason.code) == (JobState.FAILED, "out_of_memory"), service.debug_report(job_id)
    assert "ran out of host memory" in job.reason.message
    reports = service.events(job_id, "out_of_memory")
    assert [(event["memory"], event["again"]) for event in reports] == [("host", False), ("host", True)]
    assert all("you tried to allocate" in event["error"] for event in reports), reports
    assert all("limit 2.9 GiB, which memory in scaling.resources_per_worker raises" in one["error"] for one in reports)
    (end,) = service.events(job_id, "training_ended")
    assert end["code"] == "out_of_memory"
    service.wait_for_state(other, JobState.SUCCEEDED)
    assert_metrics_of_export(service, other, "embedding")


def paused_at(service: LiveService, job_id: str, step: int) -> JobOut:
    """Pause a job after this step, or after the next one; return it once its driver has ended."""
    service.hold(job_id, step)
    service.wait_for_step(job_id, step)
    attempt = service.client.job(job_id).attempt
    service.client.pause(job_id)
    wait_for(lambda: service.run_dir(job_id).stop(attempt=attempt), "the request in the run directory")
    service.hold(job_id, None)
    paused = service.wait_for_state(job_id, JobState.PAUSED)
    wait_for(lambda: not processes_of(job_id), "the driver's end")
    done = service.metrics(job_id)[-1]["step"]
    newest, rejected = newest_verified(service.run_dir(job_id))
    assert newest is not None
    assert not rejected
    assert newest.step == paused.attempts[-1].committed_step == done
    return paused


@in_turn("chosen micro-batches")
def test_chosen_micro_batches_shrink_without_memory_stay_after_a_kill_and_fit_another_size(
    service: LiveService, reference: str
) -> None:
    parts: dict[str, dict[str, Any]] = {
        "training": {"per_device_train_batch_size": "auto"},
        "strategy": {"ulysses_size": 1},
    }
    plan = service.client.plan(yaml.safe_dump(small_job(service.home, **parts)))
    assert (plan.micro_batch_size, plan.micro_batch_by) == (2, "memory")
    job_id = service.submit(**parts)
    service.limit_micro_batches(job_id, 1)
    service.hold(job_id, 13)
    service.wait_for_step(job_id, 13)
    psutil.Process(service.events(job_id, "training_started")[-1]["workers"][1]["pid"]).kill()
    paused = paused_at(service, job_id, 17)
    service.limit_micro_batches(job_id, None)
    service.client.resume(job_id, scaling=paused.scaling.model_copy(update={"num_workers": 1}))
    job = service.wait_for_state(job_id, JobState.SUCCEEDED)
    assert [(one.result, one.workers) for one in job.attempts] == [("paused", 2), ("succeeded", 1)]
    choices = [(one["size"], one["because"], one["workers"]) for one in service.events(job_id, "micro_batch_chosen")]
    assert choices == [(2, "plan", 2), (1, "out_of_memory", 2), (1, "kept", 2), (4, "plan", 1)]
    assert [one["size"] for one in service.events(job_id, "micro_batch_proven")] == [1, 1, 4]
    (lack,) = service.events(job_id, "out_of_memory")
    assert lack["error"].endswith(
        "; per_device_train_batch_size: auto makes the next worker group take fewer than 2 at once"
    )
    numbers = ("loss", "grad_norm", "tokens")
    expected = {line["step"]: line for line in service.metrics(reference)}
    lines = service.metrics(job_id)
    assert {line["step"] for line in lines} == expected.keys()
    for line in lines:
        same = expected[line["step"]]
        assert line["samples"] == same["samples"], line
        assert [line[name] for name in numbers] == pytest.approx([same[name] for name in numbers], rel=1e-5), line


@in_turn("layers shared")
def test_paused_job_whose_workers_share_layers_resumes_at_another_size(service: LiveService, reference: str) -> None:
    job_id = service.submit(strategy={"ulysses_size": 1, "tp_size": 2})
    paused = paused_at(service, job_id, 3)
    service.client.resume(job_id, scaling=paused.scaling.model_copy(update={"num_workers": 4}))
    job = service.wait_for_state(job_id, JobState.SUCCEEDED)
    assert [(one.result, one.workers) for one in job.attempts] == [("paused", 2), ("succeeded", 4)]
    assert job.lost_work.steps == 0
    lines, expected = service.metrics(job_id), service.metrics(reference)
    assert [line["samples"] for line in lines] == [line["samples"] for line in expected]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=1e-5)


@in_turn("fewer layers shared")
def test_example_of_shared_layers_goes_on_without_sharing(service: LiveService) -> None:
    example = parse_text(Path("examples/tensor-parallel.yaml").read_text())
    job_id = service.client.submit(dump(override(example, {"training": {"max_steps": 12, "audit_samples": True}}))).id
    paused_at(service, job_id, 3)
    alone: dict[str, object] = {"strategy": {"tp_size": 1}, "scaling": {"num_workers": 1}}
    clone = service.client.clone(job_id, overrides=alone)
    service.wait_for_state(clone.id, JobState.SUCCEEDED)
    lines = service.metrics(job_id) + service.metrics(clone.id)
    assert [line["step"] for line in lines] == list(range(1, 13))
    samples = [sample for line in lines for sample in line["samples"]]
    assert len(set(samples)) == len(samples) == 12 * 8
    assert lines[-1]["loss"] < lines[0]["loss"]


SMALLER: dict[str, dict[str, Any]] = {
    "roll": {
        "strategy": {"fsdp_size": 2},
        "scaling": {"num_workers": 4},
        "training": {"gradient_accumulation_steps": 2},
    },
    "fsdp1": {"strategy": {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}}},
    "accelerate": {"strategy": {"fsdp_size": 0}},
    "trainer": {},
}
"""Fields of the examples for users of other tools that fit two workers, or four."""


@pytest.mark.parametrize("name", drawn(list(SMALLER), 1))
@in_turn("other tool")
def test_example_of_another_tool_trains_at_toy_size(service: LiveService, name: str) -> None:
    example = parse_text(Path(f"examples/coming-from/{name}.yaml").read_text())
    toy: dict[str, dict[str, Any]] = {
        "model": {"path": None, "config": TINY},
        "data": {"train": {"path": "stdlib://json/*.py"}, "sequence_length": 32},
        "training": {"num_train_epochs": None, "max_steps": 3, "per_device_train_batch_size": 1, "logging_steps": 1},
        "scaling": {"num_workers": 2, "resources_per_worker": {"CPU": 0.25, "GPU": 0}},
    }
    job = service.client.submit(dump(override(override(example, toy), SMALLER[name])))
    service.wait_for_state(job.id, JobState.SUCCEEDED)
    lines = service.metrics(job.id)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(5.0 < line["loss"] < 7.0 for line in lines)


@in_turn("mixture")
def test_published_mixture_keeps_every_sample_through_a_kill_and_other_layouts(service: LiveService) -> None:
    folder = service.home / "data" / "mixture"
    job_id = service.client.submit(dump(mixture_job(folder))).id
    service.hold(job_id, 4)
    service.wait_for_step(job_id, 4)
    psutil.Process(service.events(job_id, "training_started")[-1]["workers"][1]["pid"]).kill()
    wait_for(lambda: service.events(job_id, "training_started")[1:], "a restart")
    paused_at(service, job_id, 6)
    lines = service.metrics(job_id)
    for workers, tp, ep in ((1, 1, 1), (2, 2, 2)):
        layout: dict[str, object] = {"strategy": {"tp_size": tp, "ep_size": ep}, "scaling": {"num_workers": workers}}
        job_id = service.client.clone(job_id, overrides=layout).id
        if ep == 1:
            paused_at(service, job_id, 9)
        else:
            service.wait_for_state(job_id, JobState.SUCCEEDED)
        lines += service.metrics(job_id)
    taken = {line["step"]: line["samples"] for line in lines}
    assert [line["samples"] for line in lines] == [taken[line["step"]] for line in lines]
    assert sorted(sample for samples in taken.values() for sample in samples) == list(range(ROWS))
    exported = Job(service.client, service.client.job(job_id)).export(dtype="fp32", timeout=240)
    assert exported.path is not None
    assert loss_of_export(local_path(exported.path), folder) == pytest.approx(lines[-1]["eval_loss"], rel=1e-5)


@in_turn("adapters")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads a deprecated property
def test_adapters_survive_a_kill_and_a_resize_and_load_in_peft_and_transformers(service: LiveService) -> None:
    base = service.home / "data" / "llama"
    spec = adapters_job(base)
    job_id = service.client.submit(dump(spec)).id
    service.hold(job_id, 3)
    service.wait_for_step(job_id, 3)
    psutil.Process(service.events(job_id, "training_started")[-1]["workers"][1]["pid"]).kill()
    wait_for(lambda: service.events(job_id, "training_started")[1:], "a restart")
    service.hold(job_id, 6)
    service.wait_for_step(job_id, 6)
    service.client.resume(job_id, scaling=spec.scaling.model_copy(update={"num_workers": 1}))
    wait_for(lambda: service.run_dir(job_id).stop(attempt=1), "the request in the run directory")
    service.hold(job_id, None)
    job = service.wait_for_state(job_id, JobState.SUCCEEDED)
    assert [(one.result, one.workers) for one in job.attempts] == [("resized", 2), ("succeeded", 1)]
    assert service.events(job_id, "training_started")[1]["resumed_from"] == 2
    audit = service.client.audit_job(job_id)
    assert (audit.clean, audit.steps, audit.samples) == (True, ADAPTER_STEPS, ADAPTER_ROWS)
    assert [one.step for one in service.client.checkpoints(job_id).data] == [ADAPTER_STEPS]

    wishes = {form: ExportIn(dtype="fp32", form=form) for form in ("adapter", "merged")}
    for wish in wishes.values():
        service.client.export(job_id, ADAPTER_STEPS, wish)

    def exported(form: str) -> ExportOut | None:
        status = service.client.exported(job_id, ADAPTER_STEPS, wishes[form])
        assert status.state != "failed", status.reason
        return status if status.state == "done" else None

    folder = local_path(wait_for(lambda: exported("adapter"), "the adapters", pause=SERVICE_PAUSE).path)
    # So small a rate changes nothing: the run has the adapters of the folder.
    training = {"learning_rate": 1e-30, "num_train_epochs": None, "max_steps": 1}
    parts = {"model": {"lora": None, "adapter": folder.as_uri()}, "training": training}
    again = service.client.submit(dump(override(spec, parts))).id
    merged = wait_for(lambda: exported("merged"), "the merged model", pause=SERVICE_PAUSE)
    whole, with_adapters = local_path(merged.path), outputs(base, folder)
    torch.testing.assert_close(outputs(whole), with_adapters, rtol=1e-5, atol=1e-5)
    assert (outputs(base) - with_adapters).abs().max() > 1e-2
    events = sorted(service.events(job_id, "exported"), key=lambda line: str(line["form"]))
    assert [(line["form"], line["folder"]) for line in events] == [("adapter", str(folder)), ("merged", str(whole))]
    assert events[1]["difference"] == merged.difference
    assert merged.difference is not None
    assert merged.difference < 1e-5
    service.wait_for_state(again, JobState.SUCCEEDED)
    before = load_checkpoint(service.run_dir(job_id).root, ADAPTER_STEPS)["model"]
    after = load_checkpoint(service.run_dir(again).root, 1)["model"]
    assert all("lora_" in name for name in before)
    assert before.keys() == after.keys()
    assert all(torch.allclose(after[name], value, rtol=0, atol=1e-20) for name, value in before.items())


@in_turn("clone")
def test_clone_continues_from_the_checkpoint_of_another_job(service: LiveService, reference: str) -> None:
    more: JsonValue = {"max_steps": STEPS + 5}
    with pytest.raises(ApiError) as refused:
        service.client.clone(reference, overrides={"model": {"config": {"hidden_size": 64}}, "training": more})
    (problem,) = refused.value.problem.errors or []
    assert problem.pointer == "/model/config"
    assert "the model differs from the checkpoint of step 40" in problem.message
    first = service.client.checkpoints(reference).data[0].step
    clone = service.client.clone(reference, from_checkpoint=first)
    job = service.wait_for_state(clone.id, JobState.SUCCEEDED)
    assert job.parent is not None
    assert (job.parent.step, job.progress.step) == (first, STEPS)
    names = ("samples", "loss", "grad_norm", "tokens", "lr")
    expected = {line["step"]: [line[name] for name in names] for line in service.metrics(reference)}
    found = {line["step"]: [line[name] for name in names] for line in service.metrics(clone.id)}
    assert found == {step: expected[step] for step in range(first + 1, STEPS + 1)}
    assert job.goodput is not None
    assert job.goodput < 1


@in_turn("link")
def test_link_that_replaces_data_after_the_submit_is_not_trained_on(service: LiveService, tmp_path: Path) -> None:
    path, outside = service.home / "data" / "link.parquet", tmp_path / "outside.parquet"
    for place in (path, outside):
        write_tokens(place, rows=64, length=32, vocab=TINY["vocab_size"])
    job_id = service.submit(data={"train": {"path": path.as_uri()}, "columns": {"input_ids": "ids"}})
    path.unlink()
    path.symlink_to(outside)
    job = service.wait_for_state(job_id, JobState.FAILED)
    assert (job.attempt, job.reason and job.reason.code) == (1, "data_error")
    assert job.reason is not None
    assert f"{path.as_uri()} lies outside the allowed storage roots" in job.reason.message


# One by commit, as the head below: tests/distributed compares each with its plain loop.
@in_turn("own code")
@pytest.mark.parametrize("name", drawn(NAMES, 1))
def test_own_code_equals_its_plain_loop(service: LiveService, name: str) -> None:
    folder = service.home / "data" / "own"
    write_example(folder, name)
    raw = example_job(folder, name) | {"project": "own"}
    with pytest.raises(ApiError, match="may not run its own code"):
        service.client.submit(yaml.safe_dump(raw | {"project": "default"}))
    job_id = service.client.submit(yaml.safe_dump(raw)).id
    service.wait_for_state(job_id, JobState.SUCCEEDED)
    lines = service.metrics(job_id)
    losses, evaluation, _ = plain_loop(folder, name, lines)
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert lines[-1]["eval_loss"] == pytest.approx(evaluation, rel=1e-5)


@in_turn("head")
@pytest.mark.parametrize("head", drawn(["sequence_classification", "reward"], 1))
def test_text_with_a_head_becomes_a_model_of_transformers(service: LiveService, head: str) -> None:
    job_id = service.submit(**TEXT_HEADS[head].write(service.home / "data" / head))
    service.wait_for_state(job_id, JobState.SUCCEEDED)
    assert_metrics_of_export(service, job_id, head)


def assert_metrics_of_export(service: LiveService, job_id: str, head: str) -> None:
    """Check that transformers alone computes the metrics of a job's last evaluation from its export."""
    job = Job(service.client, service.client.job(job_id))
    *_, last = job.metrics()
    exported = job.export(dtype="fp32", timeout=240)
    assert exported.path is not None
    expected = TEXT_HEADS[head].metrics(local_path(exported.path), service.home / "data" / head)
    assert {name: last[f"eval_{name}"] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert expected.get("recall_at_1", expected.get("accuracy", 0.0)) > 0.9


@in_turn("short data")
def test_too_short_data_for_the_schedule_fails_the_job_without_lost_workers(
    service: LiveService,
) -> None:
    # The number of steps of text data is known only after preparation.
    data = {
        "train": {"path": "stdlib://json/*.py"},
        "sequence_length": 4096,
        "columns": {"text": "text"},
        "packing": True,
    }
    training = {"max_steps": None, "num_train_epochs": 1, "warmup_steps": 900}
    job_id = service.submit(data=data, training=training)
    states = list[JobState]()

    def ended() -> bool:
        states.append(service.client.job(job_id).state)
        return states[-1].terminal

    wait_for(ended, "the end of the job", seconds=120)
    assert states[-1] is JobState.FAILED
    assert JobState.RECOVERING not in states
    job = service.client.job(job_id)
    assert job.reason is not None
    assert job.reason.code == "user_error"
    assert job.reason.message.startswith("warmup_steps=900 is not less than the")
    assert len(job.attempts) == 1
    assert service.events(job_id, "workers_lost") == []


def test_invalid_input_is_rejected_over_http_with_rule_value_and_remedy(service: LiveService, tmp_path: Path) -> None:
    outside = {"train": {"path": f"{tmp_path}/x.parquet"}}
    misspelled = {"config": {"model_type": "qwen3", "hiden_size": 32}}
    with pytest.raises(ApiError) as caught:
        service.submit(data=outside, model=misspelled)
    problem = caught.value.problem
    assert (problem.status, problem.code) == (422, "invalid_spec")
    found = {error.pointer: error.message for error in problem.errors or []}
    assert "lies outside the allowed storage roots" in found["/data/train/path"]
    assert found["/model/config"] == "Qwen3Config has no field hiden_size; did you mean hidden_size?"


def test_job_too_large_for_the_cluster_stays_queued_with_a_reason(service: LiveService) -> None:
    job_id = service.submit(training={"global_batch_size": 16}, scaling={"num_workers": 16})

    def unschedulable() -> ReasonOut | None:
        reason = service.client.job(job_id).reason
        return reason if reason is not None and reason.code == "unschedulable" else None

    reason = wait_for(unschedulable, "the reason")
    assert reason.message.startswith("16 workers need 8 CPU (the cluster has 3) and ")
    assert reason.message.endswith(" GiB of memory (the cluster has 3.0 GiB)")
    assert reason.remedy == "add nodes, or cancel and submit fewer or smaller workers"
    assert service.client.job(job_id).state is JobState.QUEUED
    service.client.cancel(job_id)
    service.wait_for_state(job_id, JobState.CANCELLED)


@in_turn("weights of a job")
def test_inference_reads_the_weights_of_a_jobs_checkpoint(service: LiveService, reference: str) -> None:
    raw = {
        "name": "scores",
        "kind": "infer",
        "model": {"job": reference},
        "data": {
            "train": {"path": f"file://{service.home}/data/tokens.parquet"},
            "columns": {"input_ids": "ids"},
            "sequence_length": 32,
        },
        "infer": {"output": "perplexity", "batch_size": 64, "rows_per_shard": 128},
        "scaling": {"num_workers": 1, "resources_per_worker": {"CPU": 0.5}},
    }
    job_id = service.client.submit(json.dumps(raw)).id
    job = service.wait_for_state(job_id, JobState.SUCCEEDED)
    assert job.parent is not None
    assert (job.parent.job, job.parent.step, job.progress.step) == (reference, STEPS, 400)
    rows = list(Job(service.client, job).results())
    assert rows == list(read_rows(service.run_dir(job_id)))
    assert [row["row"] for row in rows] == list(range(400))
    assert service.run_dir(reference).pins() == set()


@in_turn("inference killed")
def test_inference_survives_kills_of_worker_service_and_driver_without_repeated_or_missing_rows(
    service: LiveService,
) -> None:
    job_id = service.client.submit(Path("examples/infer.yaml").read_bytes()).id
    # Two workers compute four rows at once, and a shard has six: two rows of the second are computed in vain.
    service.hold(job_id, 8)
    wait_for(lambda: service.events(job_id, "results_committed"), "a shard", seconds=120)
    service.kill()
    service.start(quick=True)
    psutil.Process(service.events(job_id, "work_started")[-1]["workers"][1]["pid"]).kill()
    service.hold(job_id, 14)
    wait_for(lambda: service.events(job_id, "results_committed")[1:], "a second shard", seconds=120)
    service.wait_for_state(job_id, JobState.RUNNING)
    service.driver(job_id).kill()
    # Its workers live a little longer, and would continue.
    wait_for(lambda: service.events(job_id, "work_started")[2:], "a second attempt", seconds=120)
    service.hold(job_id, None)
    job = service.wait_for_state(job_id, JobState.SUCCEEDED)
    files = sorted(Path(email.__file__).parent.glob("*.py"))
    assert (job.restarts, job.progress.step, job.progress.of, job.progress.unit) == (2, *[len(files)] * 2, "row")
    assert [attempt.result for attempt in job.attempts] == ["failed", "succeeded"]
    assert [line["resumed_from"] for line in service.events(job_id, "work_started")] == [0, 6, 12]
    assert [line["first_row"] for line in service.events(job_id, "results_committed")] == list(range(0, len(files), 6))
    rows = list(read_rows(service.run_dir(job_id)))
    assert [(row["row"], row["text"]) for row in rows] == list(enumerate(file.read_text() for file in files))
    assert all(len(row["logprobs"]) == row["tokens"] - 1 for row in rows)
    assert job.worker_hours > 0
