"""MLflow and W&B: every step once, also after restarts, without secrets; read from their own stores."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.builders.sinks import a_run, log_steps
from tests.support.builders.specs import spec
from tests.support.clients.wandb_files import read_runs
from train_loop.run_dir import Outcome, RunDir, SinkName
from train_loop.sinks.cursor import SinkCursor
from train_loop.sinks.describe import Description
from train_loop.sinks.registry import open_sink

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# MLflow's own store causes this warning of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")
JOB = "job-01m7y52wjcsrqx0er877149vvx"
SECRET = "hunter2-hunter2"


def hand_over(run_dir: RunDir, sink: SinkName, outcome: Outcome | None = None) -> None:
    """Forward all new lines with a new forwarder."""
    newcomer = SinkCursor(run_dir, sink, partial(open_sink, sink, run_dir))
    newcomer.hand_over()
    newcomer.close(outcome)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return the run directory of a job whose spec contains a secret of the environment."""
    monkeypatch.setenv("DATA_PASSWORD", SECRET)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = RunDir(tmp_path / JOB)
    run_dir.write_spec(spec(data={"train": {"path": f"file:///{SECRET}/*.parquet"}}))
    log_steps(run_dir, range(1, 6))
    return run_dir


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[MlflowClient]":
    # Imported here only: collecting the tests would take seconds longer.
    mlflow = importlib.import_module("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(None)
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(None)


def the_run(client: "MlflowClient") -> "Run":
    (run,) = client.search_runs([client.get_experiment_by_name("default").experiment_id])
    return run


def losses(client: "MlflowClient") -> list[tuple[int, float, int]]:
    found = client.get_metric_history(the_run(client).info.run_id, "train/loss")
    return sorted((metric.step, metric.value, metric.timestamp) for metric in found)


def test_mlflow_has_one_run_per_job_across_restarts(run_dir: RunDir, client: "MlflowClient") -> None:
    hand_over(run_dir, "mlflow", Outcome(result="failed"))
    assert the_run(client).info.status == "FAILED"
    log_steps(run_dir, [4, 5, 6], attempt=2, extra=0.5)
    hand_over(run_dir, "mlflow")
    run = the_run(client)
    assert (run.info.run_name, run.data.tags["trainshed.job_id"]) == (f"tiny ({JOB})", JOB)
    assert (run.info.status, run.info.end_time) == ("RUNNING", None)
    again = [(4, 4.5, 1_004_000), (5, 5.5, 1_005_000), (6, 6.5, 1_006_000)]
    assert losses(client) == sorted([(step, float(step), (1000 + step) * 1000) for step in range(1, 6)] + again)


def test_mlflow_gets_the_spec_without_secrets(run_dir: RunDir, client: "MlflowClient") -> None:
    hand_over(run_dir, "mlflow")
    params = the_run(client).data.params
    assert params["model.config.hidden_size"] == "32"
    assert params["data.train.path"] == "file:///***/*.parquet"
    assert SECRET not in str(params)


def test_mlflow_run_without_params_gets_them(
    run_dir: RunDir, client: "MlflowClient", monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.MlflowClient.log_batch", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hand_over(run_dir, "mlflow")
    hand_over(run_dir, "mlflow")
    assert the_run(client).data.params["model.config.hidden_size"] == "32"
    assert len(losses(client)) == 5


def test_wandb_has_every_step_including_repeated_ones(run_dir: RunDir) -> None:
    hand_over(run_dir, "wandb")
    log_steps(run_dir, [4, 5, 6], attempt=2, extra=0.5)
    # The names of wandb's folders differ only by the second of their creation.
    time.sleep(1.1)
    hand_over(run_dir, "wandb", Outcome(result="succeeded"))
    runs = read_runs(run_dir.root / "sinks")
    assert [(run.id, run.project, run.name) for run in runs] == [(JOB, "default", "tiny")] * 2
    assert runs[0].config["model"]["config"]["hidden_size"] == 32
    assert SECRET not in json.dumps(runs[0].config)
    history = [(row["step"], row["train/loss"], row["_timestamp"]) for run in runs for row in run.history]
    assert history == [(step, step, 1000 + step) for step in range(1, 6)] + [
        (step, step + 0.5, 1000 + step) for step in (4, 5, 6)
    ]
    assert runs[0].axes == {"*": "step"}


def test_wandb_loses_nothing_if_the_driver_is_killed(run_dir: RunDir) -> None:
    code = (
        "import sys, os, signal; from functools import partial; from train_loop.run_dir import RunDir;"
        "from train_loop.sinks.cursor import SinkCursor; from train_loop.sinks.registry import open_sink;"
        "run_dir = RunDir.at(sys.argv[1]);"
        "SinkCursor(run_dir, 'wandb', partial(open_sink, 'wandb', run_dir)).hand_over(); os.kill(os.getpid(), 9)"
    )
    # This process has its own wandb, like a driver.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    victim = subprocess.run([sys.executable, "-c", code, str(run_dir.root)], env=environment, check=False)
    assert victim.returncode == -signal.SIGKILL
    log_steps(run_dir, [6])
    time.sleep(1.1)
    hand_over(run_dir, "wandb")
    assert {row["step"] for run in read_runs(run_dir.root / "sinks") for row in run.history} == set(range(1, 7))


def test_wandb_recovers_after_a_connection_error(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    for _ in range(2):
        with pytest.raises(Exception, match="connection refused"):
            hand_over(run_dir, "wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    hand_over(run_dir, "wandb")
    assert [row["step"] for run in read_runs(run_dir.root / "sinks") for row in run.history] == [1, 2, 3, 4, 5]


def test_run_directories_of_one_name_get_different_run_ids(tmp_path: Path) -> None:
    here, there = a_run(tmp_path / "here" / "my run"), a_run(tmp_path / "there" / "my run")
    ids = {Description.of(here).id, Description.of(there).id}
    assert len(ids) == 2
    assert all(found.startswith("my-run-") for found in ids)
    assert Description.of(a_run(tmp_path / JOB)).id == JOB


def test_flat_spec_names_every_value(tmp_path: Path) -> None:
    flat = Description("id", "name", "project", {"a": {"b": 1, "c": {}}, "d": [1, {"e": None}], "f": None, "g": True})
    assert flat.flat() == {"a.b": "1", "a.c": "{}", "d": '[1, {"e": null}]', "g": "true"}


@pytest.mark.parametrize("sink", ["mlflow", "wandb"])
def test_missing_package_is_reported_with_its_remedy(
    run_dir: RunDir, sink: SinkName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, sink, None)
    with pytest.raises(ValueError, match=rf"the sink {sink} needs {sink}, .*; run pip install -e '\.\[{sink}\]'"):
        open_sink(sink, run_dir)
