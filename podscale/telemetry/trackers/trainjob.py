"""Progress of a TrainJob, sent to Kubeflow Trainer, which shows it as `status.trainerStatus` of the job.

Trainer sets the environment variables if its feature gate TrainJobStatus is on (alpha in 2.3). The limits are those of
its status server and of the job's CustomResourceDefinition.
"""

import http.client
import json
import math
import ssl
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from podscale.errors import ExitCode
from podscale.telemetry.events import EventRecord
from podscale.telemetry.step_log import EtaEstimator
from podscale.telemetry.trackers.base import LaunchExit, PointBuilder, launch_step

URL, CA_CERT, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
"""Environment variables: URL of the status server, path of its CA certificate, path of a token that rotates."""
INTERVAL_SECONDS = 30.0
TIMEOUT_SECONDS = 4.0
MAX_METRICS, MAX_NAME_LENGTH = 256, 64
MAX_SECONDS = 2**31 - 1


def is_enabled(environment: Mapping[str, str]) -> bool:
    return all(environment.get(name) for name in (URL, CA_CERT, TOKEN))


class TrainJobStatus:
    """Reporter of the newest metrics, every `interval` seconds and when closed. `warn` receives the first error."""

    def __init__(
        self, environment: Mapping[str, str], warn: Callable[[str], None], interval: float = INTERVAL_SECONDS
    ) -> None:
        self.location = environment[URL]
        self._ca, self._token = Path(environment[CA_CERT]), Path(environment[TOKEN])
        self._warn, self._interval = warn, interval
        self._warned = False
        self._due = time.monotonic()
        self._point_builder, self._eta = PointBuilder(), EtaEstimator()
        self._step = 0
        self._seconds_left: float | None = None
        self._values: dict[str, float] = {}

    def add(self, record: EventRecord) -> None:
        seconds_left = self._eta.update(record)
        if (first_step := launch_step(record)) is not None:
            self._step, self._seconds_left = first_step, None
        if (point := self._point_builder.point(record)) is not None:
            self._step = point.step
            self._values |= point.values
            self._seconds_left = seconds_left if point.kind == "step" else self._seconds_left

    def flush(self) -> None:
        if self._eta.total_steps is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval
            self._report_status()

    def close(self, launch_exit: LaunchExit) -> None:
        self._report_status(done=launch_exit.exit_code == ExitCode.DONE)

    def status(self, *, done: bool = False) -> dict[str, Any]:
        """Return the body of a request; the progress is at most 99 % until the training is done."""
        metrics = [
            {"name": name, "value": f"{value:.6g}"}
            for name, value in self._values.items()
            if len(name) <= MAX_NAME_LENGTH
        ]
        status: dict[str, Any] = {"lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds")}
        if done:
            status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        elif self._eta.total_steps:
            status["progressPercentage"] = min(99, 100 * self._step // self._eta.total_steps)
            if self._seconds_left is not None:
                status["estimatedRemainingSeconds"] = min(MAX_SECONDS, max(0, math.ceil(self._seconds_left)))
        return {"trainerStatus": {**status, "metrics": metrics[:MAX_METRICS]}}

    def _report_status(self, *, done: bool = False) -> None:
        try:
            self._post(json.dumps(self.status(done=done)).encode())
        except (OSError, ValueError, http.client.HTTPException) as error:  # an outage does not stop the job
            if not self._warned:
                self._warn(f"cannot send the status of the TrainJob: {error}")
            self._warned = True

    def _post(self, body: bytes) -> None:
        """Send the body directly to the server, so that no proxy or redirect target gets the token."""
        url = urlsplit(self.location)
        if url.scheme != "https" or url.hostname is None:
            raise ValueError(f"{URL}={self.location} is not an https:// URL")
        context = ssl.create_default_context(cafile=str(self._ca))
        connection = http.client.HTTPSConnection(url.hostname, url.port, timeout=TIMEOUT_SECONDS, context=context)
        try:
            token = self._token.read_text(encoding="utf-8").strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", url.path, body, headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise OSError(f"{response.status} {response.reason}: {response.read(200).decode('utf-8', 'replace')}")
        finally:
            connection.close()
