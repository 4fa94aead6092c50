"""Accompanies a job to its end: tells how it stands, shows the log of rank 0, deletes what no restart can help.

The job does not need us. An outage of the API server, our own restart or our death cost it nothing; whoever submits
again finds it where it is.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from podscale.errors import PodscaleError
from podscale.launch.cluster.api import Api
from podscale.launch.cluster.errors import NotFound, Refused
from podscale.launch.cluster.logs import LogFollower
from podscale.launch.cluster.observe import Observer, observing
from podscale.launch.cluster.patience import Tell
from podscale.launch.cluster.pods import name_of
from podscale.launch.cluster.removal import delete
from podscale.launch.cluster.resources import NAMESPACES, Object, Resource
from podscale.launch.cluster.state import JobState

Show = Callable[[str], None]
"""Takes one line of the job's log."""


@dataclass(frozen=True)
class Limits:
    """Seconds: between two looks at most and at least; how long to bear what nobody mends; for the last of the log."""

    look: float = 5.0
    rest: float = 0.5
    hopeless: float = 300.0
    log: float = 30.0


class JobVanished(PodscaleError):
    """The job was deleted during the wait for it; the field is the job."""


class JobReplaced(JobVanished):
    """Another job of its name was submitted."""


class NamespaceGone(JobVanished):
    """Its namespace was deleted; the field is the namespace."""


def wait(
    api: Api, resource: Resource, job: Object, *, show: Show, tell: Tell, limits: Limits | None = None
) -> JobState:
    """Waits until the job has ended; returns its last state, whose `ending` says how the stage ended.

    A job whose input is bad, or that never ran and waits for what nobody mends, is deleted and counts as failed. One
    that ran is left: a replacement that cannot be started (a registry that is down, a node) does not undo its work.
    Raises JobVanished where it is deleted by somebody else, and what the API raises.
    """
    limits = limits or Limits()
    with observing(api, resource, job) as observer:
        log = LogFollower(api, observer.pods, show, tell)
        state = _Vigil(api, resource, job, observer, tell, limits).keep()
        log.finish(limits.log)
        return state


class _Vigil:
    """One waiting: what was told last, and since when the job is stuck."""

    def __init__(
        self, api: Api, resource: Resource, job: Object, observer: Observer, tell: Tell, limits: Limits
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

    def keep(self) -> JobState:
        while True:
            self._observer.changed.clear()
            state = self._observer.state()
            if state.phase == "gone":
                raise self._vanished()
            self._report(state)
            if state.ended:
                return state
            if state.ending is not None and state.ending.bad_input:
                return self._give_up(state, state.ending.headline)
            if self._stuck(state):
                return self._give_up(state, state.reason)
            self._observer.changed.wait(self._limits.look)
            time.sleep(self._limits.rest)  # many pods change at once

    def _report(self, state: JobState) -> None:
        if str(state) != self._told:
            self._told = str(state)
            self._tell(self._told)

    def _stuck(self, state: JobState) -> bool:
        """Whether the job has waited in vain for too long, and never got further than that."""
        self._ran = self._ran or state.ran
        if not state.hopeless or self._ran:
            self._stuck_since = None
            return False
        self._stuck_since = self._stuck_since or time.monotonic()
        return time.monotonic() - self._stuck_since > self._limits.hopeless

    def _give_up(self, state: JobState, why: str) -> JobState:
        """Deletes the job, which would only fail or wait again."""
        self._tell(f"{self._resource.kind} {self._name} is deleted, because no restart can help: {why}")
        delete(self._api, self._resource, self._name, self._uid)
        return replace(state, phase="failed", reason=why)

    def _vanished(self) -> JobVanished:
        job = f"{self._resource.kind} {self._name}"
        if self._observer.replaced():
            problem = "was deleted and submitted anew by another client; this command no longer waits for it"
            return JobReplaced(problem, field=job)
        if _namespace_is_going(self._api):
            return NamespaceGone(
                f"was deleted, and {job} with it; what is on volumes outside of it is kept",
                field=f"namespace {self._api.namespace}",
                hint="Make the namespace again and submit again: training goes on from the newest checkpoint.",
            )
        hint = "Submit again to go on from the newest checkpoint."
        return JobVanished("was deleted by another client, or by `podscale stop`", field=job, hint=hint)


def _namespace_is_going(api: Api) -> bool:
    try:
        phase = (api.get(NAMESPACES, api.namespace).get("status") or {}).get("phase")
    except NotFound:
        return True
    except Refused:
        return False  # a role in one namespace may not read the namespace itself
    return bool(phase == "Terminating")
