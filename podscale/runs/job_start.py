"""Start of a job's pods as Kubernetes saw it, which the launcher leaves for rank 0.

Pods have no access to the API server, and a pod's own environment does not have the time of its creation. A pipeline's
launcher watches the pods and mounts the run directory, so it writes `.job-start` there. `podscale submit` has no volume
in common with the pods: it annotates the leading pod, where the kubelet shows the annotation as a file.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from podscale.runs.directory import RunDirectory
from podscale.util import env
from podscale.util.files import write_json
from podscale.util.formatting import format_count

SAME_START_SECONDS = 10.0
"""Largest difference between the start of a container and that of its main process, seconds. Kubernetes' times have a
resolution of one second, and a container restarts 10 s after it failed, or later."""


@dataclass(frozen=True)
class JobStart:
    """First start of a job's leading pod, unix seconds by the clocks of the API server and of its node.

    Args:
        submitted_at: Creation of the job.
        scheduled_at: The leading pod has a node.
        started_at: The leading pod's container runs.
        last_started_at: The container of the last pod runs.
        pods: Number of pods.
    """

    submitted_at: float
    scheduled_at: float
    started_at: float
    last_started_at: float
    pods: int = 1

    @property
    def scheduling(self) -> float:
        """Seconds in queues and until there is a node."""
        return max(0.0, self.scheduled_at - self.submitted_at)

    @property
    def pull(self) -> float:
        """Seconds from the node's choice to the start of the container: volumes, init containers, image."""
        return max(0.0, self.started_at - self.scheduled_at)

    def to_text(self) -> str:
        """Return the content of the file, and of the annotation."""
        return json.dumps(asdict(self))

    def to_json(self) -> dict[str, float]:
        return {
            "scheduling_seconds": self.scheduling,
            "pull_seconds": self.pull,
            "last_pod_seconds": max(0.0, self.last_started_at - self.submitted_at),
        }

    def __str__(self) -> str:
        total = self.last_started_at - self.submitted_at
        parts = f"leading pod: scheduling {self.scheduling:.0f} s, pull {self.pull:.0f} s"
        return f"{format_count(self.pods, 'pod')} started {total:.0f} s after submission ({parts})"


def write_job_start(run: RunDirectory, start: JobStart) -> None:
    """Write the file. Without it, only the metrics of the start are incomplete."""
    with suppress(OSError):
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(run.job_start, asdict(start))


def read_job_start(run: RunDirectory, launch_age: float, environ: Mapping[str, str] = os.environ) -> JobStart | None:
    """Return the start that the launcher has left, if it is that of the launch that began `launch_age` seconds ago."""
    annotation = env.read_path(env.JOB_START, environ)
    for path in filter(None, (annotation, run.job_start)):
        start = _read_file(path)
        if start is not None and abs(time.time() - launch_age - start.started_at) <= SAME_START_SECONDS:
            return start
    return None


def _read_file(path: Path) -> JobStart | None:
    try:
        return _parse_file(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=4)
def _parse_file(path: Path, modified: int) -> JobStart | None:
    """Read a file once for each modification time, since each scrape of the metrics may ask for it."""
    try:
        start = JobStart(**json.loads(path.read_text(encoding="utf-8")))
        return start if isinstance(start.started_at, int | float) else None
    except (ValueError, TypeError):
        return None
