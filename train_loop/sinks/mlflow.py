"""MLflow sink: a run on the tracking server that MLFLOW_TRACKING_URI names."""

import os
from collections.abc import Sequence
from itertools import islice

from train_loop.run_dir import Outcome
from train_loop.sinks.describe import Description
from train_loop.sinks.sink import Point, cannot_import

_JOB_TAG = "trainshed.job_id"
_METRICS_AT_ONCE, _PARAMS_AT_ONCE = 1000, 100
_LONGEST_NAME, _LONGEST_VALUE = 250, 6000
"""Maximum lengths of a name and a value that a server accepts, in characters."""
_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "paused": "SCHEDULED"}
# One retry only, as the forwarder reports a failing server and retries it. Telemetry about users is off.
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


class MLflow:
    """A run found by the job's id in its tag. A step that ran twice has both values in the metric's history."""

    settle_seconds = 0.0

    def __init__(self, described: Description) -> None:
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        try:
            # The only import of an optional dependency, which takes seconds.
            from mlflow import MlflowClient  # noqa: PLC0415
            from mlflow.entities import Metric, Param  # noqa: PLC0415
        except ImportError as error:
            raise cannot_import("mlflow", error) from error
        self._metric, self._param = Metric, Param
        self._client = MlflowClient()
        self._run_id = self._find(described)

    def write(self, points: Sequence[Point]) -> None:
        """Send points to the server."""
        metrics = iter(
            [
                self._metric(tag, value, int(point.time * 1000), point.step)
                for point in points
                for tag, value in point.scalars.items()
            ]
        )
        while some := list(islice(metrics, _METRICS_AT_ONCE)):
            self._client.log_batch(self._run_id, metrics=some, synchronous=True)

    def close(self, outcome: Outcome | None) -> None:
        """Set the run's status from the attempt's outcome."""
        if outcome is not None:
            self._client.update_run(self._run_id, status=_STATUS.get(outcome.result, "RUNNING"))

    def _find(self, described: Description) -> str:
        """Return the id of the job's run; create the run if it does not exist."""
        experiment = self._experiment(described.project)
        found = self._client.search_runs([experiment], f"tags.`{_JOB_TAG}` = '{described.id}'", max_results=1)
        if found:
            run = found[0]
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            name = f"{described.name} ({described.id})"
            run = self._client.create_run(experiment, tags={_JOB_TAG: described.id}, run_name=name)
        # The run may lack params if its creator was killed; existing params cannot be changed.
        flat = {name[:_LONGEST_NAME]: value[:_LONGEST_VALUE] for name, value in described.flat().items()}
        params = iter([self._param(name, value) for name, value in flat.items() if name not in run.data.params])
        while some := list(islice(params, _PARAMS_AT_ONCE)):
            self._client.log_batch(run.info.run_id, params=some, synchronous=True)
        run_id: str = run.info.run_id
        return run_id

    def _experiment(self, project: str) -> str:
        """Return the id of the experiment that the environment names, or of the project's experiment."""
        named: str | None = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if named:
            return named
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
        found = self._client.get_experiment_by_name(name)
        made: str = found.experiment_id if found else self._client.create_experiment(name)
        return made
