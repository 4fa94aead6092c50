"""Follow a job to its end: report its state, show the log of rank 0, delete a job that no restart can help.

The job does not depend on this process. An outage of the API server, a restart or the end of this process cost it
nothing; the next `podscale submit` finds it and follows it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from podscale.errors import PodscaleError
from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.errors import ApiError, ApiNotFound
from podscale.launch.cluster.logs import LogFollower
from podscale.launch.cluster.observe import JobObserver, observe_job
from podscale.launch.cluster.patience import Notify
from podscale.launch.cluster.pods import name_of
from podscale.launch.cluster.removal import delete_job
from podscale.launch.cluster.resources import NAMESPACES, KubernetesObject, ResourceKind
from podscale.launch.cluster.state import JobState

PrintLine = Callable[[str], None]
"""Takes one line of the job's log."""


@dataclass(frozen=True)
class WaitLimits:
    """Time limits, seconds.

    Args:
        max_poll_seconds: longest time between two looks at the job.
        min_poll_seconds: shortest time between two looks.
        permanent_seconds: timeout for conditions that need an operator.
        log_seconds: timeout for the end of the log.
    """

    max_poll_seconds: float = 5.0
    min_poll_seconds: float = 0.5
    permanent_seconds: float = 300.0
    log_seconds: float = 30.0


class JobVanished(PodscaleError):
    """The job was deleted during the wait for it; the field is the job."""


class JobReplaced(JobVanished):
    """Another job of its name was submitted."""


class NamespaceGone(JobVanished):
    """Its namespace was deleted; the field is the namespace."""


def wait_for_job(
    api: ClusterClient,
    resource: ResourceKind,
    job: KubernetesObject,
    *,
    print_line: PrintLine,
    notify: Notify,
    limits: WaitLimits | None = None,
) -> JobState:
    """Wait until the job has ended; return its last state, whose `ending` has the exit of the stage.

    A job whose input is bad, or that never ran and waits for an operator, is deleted and counts as failed. A job that
    ran is left: a replacement pod that cannot start (a registry or a node is down) does not undo its work. Raises
    JobVanished if another process deletes the job, and the errors of ClusterClient.
    """
    limits = limits or WaitLimits()
    with observe_job(api, resource, job) as observer:
        log = LogFollower(api, observer.pods, print_line, notify)
        state = _JobWatcher(api, resource, job, observer, notify, limits).wait()
        log.finish(limits.log_seconds)
        return state


class _JobWatcher:
    """Waits for one job: its last reported state, and the time since when it needs an operator."""

    def __init__(
        self,
        api: ClusterClient,
        resource: ResourceKind,
        job: KubernetesObject,
        observer: JobObserver,
        tell: Notify,
        limits: WaitLimits,
    ) -> None:
        self._api = api
        self._resource = resource
        self._name = name_of(job)
        self._uid = str(job["metadata"]["uid"])
        self._observer = observer
        self._tell = tell
        self._limits = limits
        self._told = ""
        self._stuck_since: float | None = None
        self._ran = False

    def wait(self) -> JobState:
        while True:
            self._observer.changed.clear()
            state = self._observer.state()
            if state.phase == "gone":
                raise self._vanished()
            self._report(state)
            if state.is_finished:
                return state
            if state.stage_exit is not None and state.stage_exit.is_bad_input:
                return self._give_up(state, state.stage_exit.first_line)
            if self._needs_operator(state):
                return self._give_up(state, state.reason)
            self._observer.changed.wait(self._limits.max_poll_seconds)
            time.sleep(self._limits.min_poll_seconds)  # many pods change at once

    def _report(self, state: JobState) -> None:
        if str(state) != self._told:
            self._told = str(state)
            self._tell(self._told)

    def _needs_operator(self, state: JobState) -> bool:
        """Return whether the job never ran, and has waited for an operator longer than `hopeless`."""
        self._ran = self._ran or state.has_run
        if not state.is_permanent or self._ran:
            self._stuck_since = None
            return False
        self._stuck_since = self._stuck_since or time.monotonic()
        return time.monotonic() - self._stuck_since > self._limits.permanent_seconds

    def _give_up(self, state: JobState, why: str) -> JobState:
        """Delete the job, which would only fail or wait again."""
        self._tell(f"{self._resource.kind} {self._name} is deleted, because no restart can help: {why}")
        delete_job(self._api, self._resource, self._name, self._uid)
        return replace(state, phase="failed", reason=why)

    def _vanished(self) -> JobVanished:
        job = f"{self._resource.kind} {self._name}"
        if self._observer.replaced():
            problem = "was deleted and submitted anew by another client; this command no longer waits for it"
            return JobReplaced(problem, field=job)
        if _is_namespace_terminating(self._api):
            return NamespaceGone(
                f"was deleted, and {job} with it; what is on volumes outside of it is kept",
                field=f"namespace {self._api.namespace}",
                hint="Make the namespace again and submit again: training goes on from the newest checkpoint.",
            )
        hint = "Submit again to go on from the newest checkpoint."
        return JobVanished("was deleted by another client, or by `podscale stop`", field=job, hint=hint)


def _is_namespace_terminating(api: ClusterClient) -> bool:
    try:
        phase = (api.get(NAMESPACES, api.namespace).get("status") or {}).get("phase")
    except ApiNotFound:
        return True
    except ApiError:
        return False  # a role in one namespace may not read the namespace itself
    return bool(phase == "Terminating")
