"""The jobs of a namespace or of one run, with their pods, as they stand now."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from podscale.launch.cluster import pods as pod_states
from podscale.launch.cluster import state as states
from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.errors import ApiError
from podscale.launch.cluster.observe import look_aside
from podscale.launch.cluster.pods import name_of
from podscale.launch.cluster.resources import (
    JOB_KINDS,
    NAME_LABEL,
    PODS,
    RUN_LABEL,
    STAGE_LABEL,
    Object,
    Resource,
)
from podscale.launch.cluster.state import JobState


@dataclass(frozen=True)
class Entry:
    """One job: of which run and stage, how it stands, and its pods."""

    resource: Resource
    job: Object
    state: JobState
    pods: Sequence[Object]

    @property
    def run(self) -> str:
        return str(self.job["metadata"]["labels"].get(RUN_LABEL, ""))

    @property
    def stage(self) -> str:
        return str(self.job["metadata"]["labels"].get(STAGE_LABEL, ""))

    def to_json(self) -> dict[str, Any]:
        ending = self.state.ending
        return {
            "run": self.run,
            "stage": self.stage,
            "kind": self.resource.kind,
            "name": name_of(self.job),
            "created": self.job["metadata"]["creationTimestamp"],
            "phase": self.state.phase,
            "reason": self.state.reason,
            "running": self.state.running,
            "wanted": self.state.wanted,
            "restarts": self.state.restarts,
            "exit_code": ending.exit_code if ending else None,
            "error": ending.error if ending else "",
            "pods": [_pod_json(pod) for pod in self.pods],
        }


def entries(api: ClusterClient, run: str | None = None, stage: str | None = None) -> list[Entry]:
    """The jobs that Podscale made in the namespace, by age; of one run, and of one of its stages, where named.

    Why a job waits is looked up only where one run is asked for.
    """
    jobs = jobs_of(api, run, stage)
    if not jobs:
        return []
    pods, _ = api.list(PODS, labels=_selector(run, stage), keep=pod_states.trimmed)
    return sorted(
        (_entry(api, resource, job, pods, thorough=run is not None) for resource, job in jobs),
        key=lambda entry: pod_states.created(entry.job),
    )


def jobs_of(api: ClusterClient, run: str | None = None, stage: str | None = None) -> list[tuple[Resource, Object]]:
    """The jobs alone, of all kinds.

    Raises ApiError where there seem to be none, but the cluster has a kind that these credentials may not list.
    """
    found: list[tuple[Resource, Object]] = []
    hidden: list[ApiError] = []
    for resource in JOB_KINDS.values():
        try:
            jobs, _ = api.list(resource, labels=_selector(run, stage))
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            if error.status == 403 and api.serves(resource):  # who may not list a kind is told so before its absence
                hidden.append(error)
            continue
        # what an operator makes for a job of ours bears our labels too, but belongs to it
        found += [(resource, job) for job in jobs if not job["metadata"].get("ownerReferences")]
    if hidden and not found:
        raise hidden[0]
    return found


def _selector(run: str | None, stage: str | None) -> str:
    wanted = [f"{NAME_LABEL}=podscale", f"{RUN_LABEL}={run}" if run else RUN_LABEL]
    return ",".join([*wanted, f"{STAGE_LABEL}={stage}"] if stage else wanted)


def _entry(api: ClusterClient, resource: Resource, job: Object, pods: Sequence[Object], *, thorough: bool) -> Entry:
    wanted = {name: job["metadata"]["labels"].get(name) for name in (RUN_LABEL, STAGE_LABEL)}
    own = [
        pod
        for pod in states.own_pods(job, pods)
        if all((pod["metadata"].get("labels") or {}).get(name) == value for name, value in wanted.items())
    ]
    state = states.read(job, own)
    if thorough and state.phase not in ("running", "stopped") and not state.ended:
        state = states.read(job, own, *look_aside(api, job, own))
    return Entry(resource, job, state, own)


def _pod_json(pod: Object) -> dict[str, Any]:
    return {
        "name": name_of(pod),
        "node": (pod.get("spec") or {}).get("nodeName"),
        "phase": (pod.get("status") or {}).get("phase", "Unknown"),
        "restarts": pod_states.restarts(pod),
        "reason": pod_line(pod),
    }


def pod_line(pod: Object) -> str:
    """Why a pod does not run, or how it ended, in one line; empty where it runs as it should."""
    why = pod_states.find_problem(pod)
    if why is not None:
        return why.reason
    last = next(pod_states.endings(pod), None)
    return "" if last is None or last.exit_code == 0 else f"exit code {last.exit_code}: {last.headline}"
