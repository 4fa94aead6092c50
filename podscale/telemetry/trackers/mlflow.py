"""MLflow tracker, by the package mlflow-skinny (or mlflow). A resumed run keeps its id.

A point that may have been lost is sent again, because MLflow's databases keep one of two equal points.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from podscale.config import RunConfig, result_values
from podscale.config.telemetry import MlflowSection
from podscale.errors import ExitCode
from podscale.runs import RunDirectory
from podscale.telemetry.events import EventRecord
from podscale.telemetry.trackers.base import DEFAULT_PROJECT, LaunchExit, PointBuilder, SentPoints, TrackerPoint

MAX_PARAMETERS, MAX_CHARACTERS = 100, 500
"""Limits of every MLflow server: parameters per request, characters per value."""
MAX_POINTS = 50
"""Maximal number of points per request, whose limit is 1000 metrics."""
RETRY_SECONDS = 30.0
RUN_STATUSES: Mapping[int, str] = {ExitCode.DONE: "FINISHED", ExitCode.PREEMPTED: "KILLED"}


class Mlflow:
    """Tracker for MLflow. `warn` receives the error of an outage."""

    def __init__(self, config: RunConfig, run: RunDirectory, warn: Callable[[str], None]) -> None:
        from mlflow import MlflowClient

        self._warn = warn
        self._client: Any = MlflowClient(tracking_uri=config.telemetry.mlflow.tracking_uri)
        self._sent = SentPoints.for_run(run, "mlflow")
        self._point_builder = PointBuilder()
        self._pending: list[TrackerPoint] = []
        self._wait_until = 0.0
        self._run_id = os.environ.get("MLFLOW_RUN_ID") or self._sent.id
        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._create(config)
        self._sent.save_id(self._run_id)
        self.location = f"run {self._run_id} at {self._client.tracking_uri}"

    def add(self, record: EventRecord) -> None:
        point = self._point_builder.point(record)
        if point is not None and self._sent.take(point):
            self._pending.append(point)

    def flush(self) -> None:
        if time.monotonic() < self._wait_until:
            return
        try:
            self._send()
        except Exception as error:  # MLflow raises the errors of its HTTP and database libraries
            if not self._wait_until:
                self._warn(f"mlflow does not answer, metrics are sent later: {error}")
            self._wait_until = time.monotonic() + RETRY_SECONDS

    def close(self, launch_exit: LaunchExit) -> None:
        self._send()
        if launch_exit.error:
            self._client.set_tag(self._run_id, "error", launch_exit.error)
        self._client.set_terminated(self._run_id, RUN_STATUSES.get(launch_exit.exit_code, "FAILED"))

    def _create(self, config: RunConfig) -> str:
        """Create a run, and its experiment if needed; return the run's id."""
        from mlflow.entities import Param

        experiment_id = find_experiment(self._client, config.telemetry.mlflow)
        run_id = str(self._client.create_run(experiment_id, run_name=config.run.id).info.run_id)
        parameters = [Param(key, str(value)[:MAX_CHARACTERS]) for key, value in result_values(config).items()]
        for first in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(run_id, params=parameters[first : first + MAX_PARAMETERS])
        return run_id

    def _send(self) -> None:
        """Send the pending points in batches."""
        from mlflow.entities import Metric

        while batch := self._pending[:MAX_POINTS]:
            metrics = [
                Metric(name, value, round(point.time * 1000), point.step)
                for point in batch
                for name, value in point.values.items()
            ]
            self._client.log_batch(self._run_id, metrics=metrics)
            del self._pending[: len(batch)]
            for point in batch:
                self._sent.mark_sent(point)
            self._sent.save()
        self._wait_until = 0.0


def find_experiment(client: Any, section: MlflowSection) -> str:
    """Return the id of the document's experiment, which is created if it does not exist."""
    name = section.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
    experiment = client.get_experiment_by_name(name)
    return str(experiment.experiment_id if experiment is not None else client.create_experiment(name))
