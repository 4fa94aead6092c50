"""Heartbeat of a pipeline's launcher in the run directory, by which a training job notices that its pipeline is gone.

Pods have no access to the API server, so the launcher and the job's pods meet on the shared volume. The launcher
rewrites `.launcher-heartbeat` every few seconds. Each pod measures on its own clock how long the content stays the
same, because clocks of two nodes may differ. The leading pod keeps the measured time in `.launcher-silence`, so that a
restart of the pod does not reset it. After the grace time it marks the job as abandoned there; this is final for that
job, and only a launcher that has deleted the job removes the mark. The other pods look for the mark, because they may
wait for a leading pod that has ended, and a little later decide themselves, because the leading pod may never have
started.

This is not the run directory's lease (podscale.runs.lease), which decides who may write the directory.
"""

import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from podscale.errors import InputError, JobAbandoned
from podscale.runs.directory import RunDirectory
from podscale.util import env
from podscale.util.files import write_json

MAX_INTERVAL_SECONDS = 15.0
"""Longest time between two heartbeats, and between two looks at them, seconds."""
INTERVALS_PER_GRACE = 8
"""Least number of heartbeats in a grace time."""
MARGIN_INTERVALS = 3
"""Time after the grace time at which a pod that does not lead decides, in intervals."""

FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Error numbers of a volume that only a person can fix."""

logger = logging.getLogger(__name__)


def abandoned_message(grace_seconds: float) -> str:
    return (
        f"the launcher of this job's pipeline was silent for {grace_seconds / 60:g} minutes "
        "(launch.cluster.launcher_grace_minutes)"
    )


def check_not_abandoned(run: RunDirectory, stage: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise JobAbandoned in a pod of a pipeline's job if the job is abandoned."""
    grace_seconds = env.read_seconds(env.LAUNCHER_GRACE, environ)
    if grace_seconds and is_abandoned(run, stage):
        raise JobAbandoned(
            f"{abandoned_message(grace_seconds)}, so the job has saved and its pods end",
            field=f"run {run.path.name}",
            hint="Run the pipeline again, or submit the run; training resumes from the newest checkpoint.",
        )


def heartbeat_interval(grace_seconds: float) -> float:
    """Return the time between two heartbeats, seconds; `grace_seconds` 0: no grace time."""
    return min(MAX_INTERVAL_SECONDS, grace_seconds / INTERVALS_PER_GRACE) if grace_seconds else MAX_INTERVAL_SECONDS


class LauncherHeartbeat:
    """Context manager that renews the heartbeat from a thread of its own, independent of the API server.

    A volume that does not answer is logged, not raised: the job continues during the grace time.

    Raises:
        InputError: This process may not write the run directory, so its job would stop after the grace time.
    """

    def __init__(self, run: RunDirectory, grace_seconds: float) -> None:
        self._path, self._interval = run.launcher_heartbeat, heartbeat_interval(grace_seconds)
        self._launcher, self._count = uuid.uuid4().hex, 0
        self._failure: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="launcher-heartbeat", daemon=True)

    def __enter__(self) -> "LauncherHeartbeat":
        self._renew()  # before the launcher adopts a job
        if self._failure in FORBIDDEN:
            raise InputError(
                f"the launcher cannot write the run directory: {os.strerror(self._failure)}",
                field=str(self._path.parent),
                hint="Its user (65532 in our images) and the user of the pods must both be able to write it.",
            )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(self._interval)  # a volume that hangs must not delay the launcher's exit

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._renew()

    def _renew(self) -> None:
        self._count += 1
        content = {
            "launcher": self._launcher,
            "count": self._count,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": datetime.now(UTC).isoformat(),
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, content)
        except OSError as error:
            if self._failure is None:
                logger.warning("%s: cannot write the launcher's heartbeat: %s", self._path, error.strerror)
            self._failure = error.errno or errno.EIO
            return
        if self._failure is not None:
            logger.warning("%s: the launcher's heartbeat is written again", self._path)
        self._failure = None


@dataclass(frozen=True)
class LauncherSilence:
    """Time for which a stage's leading pod has seen the same heartbeat.

    Args:
        heartbeat: Content of the heartbeat.
        is_abandoned: The grace time is over; final for the job.
    """

    stage: str
    heartbeat: str
    seconds: float
    is_abandoned: bool = False


class LauncherMonitor:
    """Watch of the heartbeat by one pod of a job.

    Args:
        fence: Raises LeaseLost if a newer launch of the run has taken over, which then watches.
        clock: Monotonic clock, seconds.
    """

    def __init__(
        self,
        run: RunDirectory,
        stage: str,
        grace_seconds: float,
        *,
        fence: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.grace_seconds = grace_seconds
        self._run, self._stage, self._fence, self._clock = run, stage, fence, clock
        self._interval = heartbeat_interval(grace_seconds)
        self._looked_at = clock()
        self._silence = read_silence(run, stage) or LauncherSilence(stage, "", 0.0)
        self._recorded_seconds = self._silence.seconds

    @property
    def is_lost(self) -> bool:
        """True once the launcher has been silent for the grace time."""
        return self._silence.is_abandoned

    def poll(self, *, is_leader: bool) -> bool:
        """Return True once the job is abandoned; cheap between two looks.

        Args:
            is_leader: This pod leads, so it records the silence and decides first.
        """
        now = self._clock()
        if self.is_lost or now - self._looked_at < self._interval:
            return self.is_lost
        # A pod that was frozen has seen nothing: it counts a few intervals, not the time since its last look.
        elapsed = min(now - self._looked_at, 3 * self._interval)
        self._looked_at = now
        if is_abandoned(self._run, self._stage):
            self._silence = replace(self._silence, is_abandoned=True)
            return True
        heartbeat = _read_heartbeat(self._run.launcher_heartbeat)
        if heartbeat is None:  # the volume does not answer, so this says nothing about the launcher
            return False
        if heartbeat != self._silence.heartbeat:
            self._silence, self._recorded_seconds = LauncherSilence(self._stage, heartbeat, 0.0), 0.0
            return False
        seconds = self._silence.seconds + elapsed
        limit = self.grace_seconds + (0 if is_leader else MARGIN_INTERVALS * self._interval)
        silence = LauncherSilence(self._stage, heartbeat, seconds, is_abandoned=seconds >= limit)
        if silence.is_abandoned or (is_leader and seconds - self._recorded_seconds >= 2 * self._interval):
            self._record(silence)
        self._silence = silence
        return self.is_lost

    def _record(self, silence: LauncherSilence) -> None:
        """Write the silence before this pod acts on it, so that the other pods see the mark when their ranks stop."""
        self._fence()
        self._recorded_seconds = silence.seconds
        try:
            write_json(self._run.launcher_silence, asdict(silence))
        except OSError as error:
            logger.warning("%s: cannot record the launcher's silence: %s", self._run.launcher_silence, error.strerror)


def read_silence(run: RunDirectory, stage: str) -> LauncherSilence | None:
    """Return the silence that pods of this stage have recorded; None if there is none."""
    try:
        silence = LauncherSilence(**json.loads(run.launcher_silence.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return silence if silence.stage == stage else None


def is_abandoned(run: RunDirectory, stage: str) -> bool:
    """Return True if the leading pod of this stage's job has marked the job as abandoned."""
    silence = read_silence(run, stage)
    return silence is not None and silence.is_abandoned


def forget_silence(run: RunDirectory) -> None:
    """Remove the record of silence, and with it the mark of an abandoned job; call it when that job is gone."""
    with suppress(OSError):
        run.launcher_silence.unlink(missing_ok=True)


def _read_heartbeat(path: Path) -> str | None:
    """Return the heartbeat; "" if there is none, None if the volume cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError):
        return None
