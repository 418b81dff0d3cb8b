"""Databases and backups that older versions wrote. See tests/fixtures/versions/make.py."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.adapters.secret_box import SecretBox
from service.adapters.sql.database import Database, open_database
from service.adapters.sql.sealing import seal_secrets
from service.adapters.sql.store import SqlJobStore
from service.adapters.sql.webhooks import SqlWebhookStore
from service.api.convert import delivery_out
from service.domain.access.roles import OPERATOR
from service.domain.jobs.job import JobState
from service.domain.jobs.observation import SubmissionStatus
from tests.support.builders.versions import VERSIONS, OldVersion, move_database
from tests.support.fakes.service import FakeService
from tests.support.servers.served import served
from tests.support.waiting import wait_for
from train_loop.run_dir import RunDir


@pytest.fixture(scope="module", params=VERSIONS)
def old(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OldVersion:
    return OldVersion.unpack(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["database", "backup"])
def client(request: pytest.FixtureRequest, old: OldVersion) -> Iterator[httpx.Client]:
    """Run the current service on the old database, or on the restored backup of it, without a cluster."""
    if request.param == "backup":
        restore(old)
    with served(old.home) as running:
        running.ready()
        wait_for(lambda: queue_is_known(running.client), "the first look at the queue")
        yield running.client


def queue_is_known(client: httpx.Client) -> bool:
    """Return True if every queued job has its place, which a service knows a moment after its start."""
    jobs = client.get("/jobs").raise_for_status().json()["data"]
    return all(job["progress"]["place"] for job in jobs if job["state"] == "QUEUED")


def restore(old: OldVersion) -> None:
    """Restore the backup into the home, which has lost its database and keys."""
    for name in ("trainshed.db", "trainshed.db.key", "admin.key"):
        (old.home / name).unlink(missing_ok=True)
    command = [sys.executable, "-m", "trainshed.cli.main", "restore", str(old.backup)]
    subprocess.run(command, check=True, env=os.environ | {"TRAINSHED_HOME": str(old.home)})
    move_database(old.home / "trainshed.db", old.made["home"], str(old.home))


def stable(answer: Any) -> Any:
    """Return an answer without the fields that depend on the time and on the cluster."""
    if isinstance(answer, list):
        return [stable(one) for one in answer]
    if not isinstance(answer, dict):
        return answer
    # The failing webhook is disabled three days after its first failure.
    changing = {"as_of", "age_seconds", "dashboard_url", "waits_for", "disabled_at", "disabled_because"}
    if answer.get("state") in ("QUEUED", "PAUSED"):
        changing |= {"goodput"}
        # The old version showed the rates of the time before.
        rates = ("tokens_per_second", "mfu", "eta_seconds")
        answer = answer | {"progress": (answer.get("progress") or {}) | dict.fromkeys(rates)}
    if answer.get("state") == "QUEUED":
        changing |= {"reason"}
    if "message_id" in answer and answer["delivered_at"] is None:
        # The old version sent the pending message again before it stopped.
        changing |= {"attempts", "next_try_at"}
    return {name: stable(value) for name, value in answer.items() if name not in changing}


def kept(before: Any, now: Any) -> Any:
    """Return `now` without the fields that `before` lacks: newer versions add fields."""
    if isinstance(before, dict) and isinstance(now, dict):
        return {name: kept(before[name], value) for name, value in now.items() if name in before}
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [kept(*pair) for pair in zip(before, now, strict=True)]
    return now


def test_service_on_database_of_old_version_gives_the_same_answers(old: OldVersion, client: httpx.Client) -> None:
    for path, before in old.answers.items():
        if "/deliveries" in path:
            # The service deletes deliveries of more than seven days ago.
            continue
        now = client.get(path).raise_for_status().json()
        assert stable(kept(before, now)) == stable(before), path


def test_keys_of_old_version_keep_their_roles_and_revocation(old: OldVersion, client: httpx.Client) -> None:
    found = {}
    for name, secret in old.made["keys"].items():
        answer = client.get("/me", headers={"Authorization": f"Bearer {secret}"})
        found[name] = answer.json()["roles"] if answer.status_code == 200 else answer.status_code
    assert found == {"alice": {"default": "editor", "nlp": "viewer"}, "bob": {"*": "viewer"}, "carol": 401}


def test_checkpoints_of_old_version_verify(old: OldVersion, client: httpx.Client) -> None:
    for state in ("SUCCEEDED", "PAUSED"):
        job = f"/jobs/{old.made['jobs'][state]}"
        steps = [one["step"] for one in client.get(f"{job}/checkpoints").raise_for_status().json()["data"]]
        assert steps
        verified = client.post(f"{job}/checkpoints/{steps[0]}/verify").raise_for_status().json()
        assert verified == {"step": steps[0], "ok": True, "faults": []}


@pytest.mark.usefixtures("client")
def test_webhook_secrets_of_old_version_are_encrypted_and_unchanged(old: OldVersion) -> None:
    database, box = Database(f"sqlite:///{old.home / 'trainshed.db'}"), SecretBox()
    assert seal_secrets(database, box, (), None) == 0, "the service has not encrypted all secrets at its start"
    found = {hook.id: hook.secret for hook in SqlWebhookStore(database.engine, box).among(None)}
    database.close()
    assert found == {one["id"]: one["secret"] for one in old.made["webhooks"].values()}


@pytest.mark.parametrize("version", VERSIONS)
def test_deliveries_of_old_version_are_unchanged(version: str, tmp_path: Path) -> None:
    old = OldVersion.unpack(version, tmp_path)
    engine = open_database(f"sqlite:///{old.home / 'trainshed.db'}")
    for hook in old.made["webhooks"].values():
        before = old.answers[f"/webhooks/{hook['id']}/deliveries?limit=100"]["data"]
        stored = SqlWebhookStore(engine).deliveries(hook["id"], after=None, limit=100)
        now = [delivery_out(one).model_dump(mode="json") for one in stored]
        assert stable(kept(before, now)) == stable(before)
        assert before
    engine.dispose()


@pytest.mark.parametrize("version", VERSIONS)
def test_paused_job_of_old_version_resumes_with_its_next_attempt(version: str, tmp_path: Path) -> None:
    old = OldVersion.unpack(version, tmp_path)
    engine = open_database(f"sqlite:///{old.home / 'trainshed.db'}")
    service, job_id = FakeService(tmp_path, store=SqlJobStore(engine)), old.made["jobs"]["PAUSED"]
    service.clock.now = service.get(job_id).updated_at + 1
    service.jobs.resume(OPERATOR, job_id, None)
    service.reconciler().run_once()
    assert service.get(job_id).state is JobState.STARTING
    launch = next(one for one in service.cluster.launches if one.submission_id == f"{job_id}-2")
    assert (RunDir.at(launch.run_dir).fence().attempt, RunDir.at(launch.run_dir).stop(attempt=2)) == (2, None)
    service.cluster.submissions[launch.submission_id] = SubmissionStatus.RUNNING
    service.event(job_id, "training_started", attempt=2, steps=100_000, replayed=0)
    service.reconciler().run_once()
    assert service.get(job_id).state is JobState.RUNNING
    engine.dispose()
