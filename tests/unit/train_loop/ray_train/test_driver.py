"""The driver: Ray settings for a spec, and the outcome of an attempt whose cleanup fails."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.support.builders.specs import spec
from train_loop.liveness.fencing import begin_group
from train_loop.ray_train import driver, worker
from train_loop.ray_train.trainer import Trainer, _storage
from train_loop.run_dir import (
    SERVICE_VERSION_VARIABLE,
    Outcome,
    RunDir,
    StorageUnavailable,
    own_version,
    read_lines,
)
from train_loop.sinks.forward import Forwarders
from train_loop.system import ray_env
from train_loop.system.ray_env import task_environment
from train_loop.telemetry.event_log import EventLog, group_journal


@pytest.mark.parametrize(("wanted", "counts"), [(True, [1, 1]), (False, [0, 0])])
def test_run_sets_the_hook_if_it_has_spare_workers(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, counts: list[int]
) -> None:
    job = spec(failure={"spare_workers": wanted})
    assert [worker._spares(job, number, {"node": 2}).count for number in (0, 1)] == counts
    variables = driver._environment(job).get("env_vars", {})
    assert (ray_env.HOOK_VARIABLE in variables) == wanted
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = task_environment()
    # Its tasks run in another environment, which lacks the hook.
    assert (environment["env_vars"][ray_env.HOOK_VARIABLE] if environment else None) == ("" if wanted else None)


def fit_and_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, end: str) -> Outcome:
    """Run an attempt whose workers report an outcome; then Ray Train fails."""
    run_dir = RunDir(tmp_path)
    run_dir.write_spec(spec())

    def fit() -> None:
        journal = group_journal(run_dir, begin_group(run_dir, 1, by="a"))
        journal.event("training_ended", result=end, step=10, reason="disk full" if end == "failed" else None)
        raise RuntimeError("worker 1 died while it removed its files")

    attempt_module = SimpleNamespace(prepare_samples=lambda *_: None, trainer=lambda *_, **__: SimpleNamespace(fit=fit))
    monkeypatch.setitem(sys.modules, "train_loop.ray_train.trainer", attempt_module)
    monkeypatch.setattr(driver, "start_ahead", lambda *_, **__: None)
    monkeypatch.setattr("ray.init", lambda **_: None)
    attempt = run_dir.attempt(1)
    return driver.run_attempt(run_dir, attempt, EventLog(attempt))


def test_run_that_finished_its_last_step_succeeds_if_cleanup_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcome = fit_and_fail(monkeypatch, tmp_path, end="succeeded")
    assert (outcome.result, outcome.step) == ("succeeded", 10)


def test_run_that_failed_stays_failed_if_cleanup_fails_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = fit_and_fail(monkeypatch, tmp_path, end="failed")
    assert (outcome.result, outcome.retryable) == ("failed", True)


@pytest.mark.parametrize("disconnects", [True, False])
def test_last_event_is_written_before_ray_is_left_and_a_stop_does_not_leave_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, disconnects: bool
) -> None:
    """Ray crashes a process in which a thread waits for Ray Train during the disconnect."""
    attempt, outcome, seen = RunDir(tmp_path).attempt(1), Outcome(result="paused", step=7), list[object]()

    def shutdown() -> None:
        seen.extend([attempt.outcome(), *(line["event"] for line in read_lines(attempt.events))])
        raise ConnectionError("the cluster is gone")

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.shutdown", shutdown)
    monkeypatch.setattr(driver, "leave", leave)
    with pytest.raises(SystemExit):
        driver._finish(attempt, EventLog(attempt), Forwarders([]), outcome, disconnects=disconnects)
    assert seen == ([None, "finished"] if disconnects else [])
    assert attempt.outcome() == outcome


def test_outcome_of_a_hang_names_the_late_rank(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(1)
    journal = EventLog(attempt, epoch=lambda: 1)
    journal.event("workers_lost", ranks=[1], hosts=["node1"], cause="hung", error="training hung: rank 1 is stopped")
    journal.flush()
    timeout = Outcome(result="failed", code="worker_failure", reason="Timed out", retryable=True)
    told = driver._with_cause(timeout, attempt)
    assert (told.code, told.reason, told.retryable) == ("hung", "training hung: rank 1 is stopped", True)


@pytest.mark.parametrize(("service", "skew"), [("9.9.9", True), (own_version(), False), (None, False)])
def test_driver_of_another_version_exits_before_reading_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: str | None, skew: bool
) -> None:
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.delenv(SERVICE_VERSION_VARIABLE, raising=False)
    if service is not None:
        monkeypatch.setenv(SERVICE_VERSION_VARIABLE, service)
    run_dir = RunDir(tmp_path)
    # A newer service would write such unknown fields.
    (tmp_path / "spec.json").write_text('{"a_field_of_tomorrow": 1}')
    attempt = run_dir.attempt(1)
    outcome = driver.run_attempt(run_dir, attempt, EventLog(attempt))
    assert (outcome.code, outcome.retryable) == (("version_skew", True) if skew else ("invalid_spec", False)), outcome
    if skew:
        assert f"the service runs Trainshed 9.9.9 and the cluster {own_version()}" in str(outcome.reason)


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_sigterm_while_ray_connects_leaves_the_end_to_the_stop_watch(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    raised = iter([SystemExit(15)])
    waited = list[float]()

    def init(**_: object) -> None:
        raise SystemExit(15)

    def install() -> None:
        # A second signal comes before Ray's handler is replaced.
        for error in raised:
            raise error

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(driver, "_END_SECONDS", seconds)
    monkeypatch.setattr("time.sleep", waited.append)
    with pytest.raises(SystemExit):
        driver.connect(install)
    assert bool(waited) is (seconds > 0)


def test_outcome_is_retried_while_storage_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, outcome = (
        RunDir(tmp_path / "run").attempt(1),
        Outcome(result="failed", code="data_error", reason="no rows"),
    )
    write, failures = type(attempt).write_outcome, [StorageUnavailable("/mnt", "gone"), NotADirectoryError(20, "no")]

    def write_outcome(self: object, found: Outcome) -> None:
        if failures:
            raise failures.pop()
        write(attempt, found)

    monkeypatch.setattr(type(attempt), "write_outcome", write_outcome)
    driver.acknowledge(attempt, EventLog(attempt), outcome)
    assert attempt.outcome() == outcome


def test_unwritable_outcome_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRAINSHED_STORAGE_SECONDS", "0")
    (tmp_path / "run").write_text("a file")
    attempt = RunDir(tmp_path / "run").attempt(1)
    with pytest.raises(OSError):
        driver.acknowledge(attempt, EventLog(attempt), Outcome(result="failed", reason="no rows"))
    assert "no rows" in caplog.text


def test_trainer_omits_unneeded_helper_processes() -> None:
    def callbacks(trainer: type[TorchTrainer]) -> set[str]:
        made = trainer(lambda: None, scaling_config=ScalingConfig(num_workers=1), run_config=RunConfig(**_storage()))
        return {type(callback).__name__ for callback in made._create_default_callbacks()}

    assert callbacks(TorchTrainer) - callbacks(Trainer) == {"DatasetsCallback", "PlacementGroupCleanerCallback"}
