"""List and stop the jobs of a namespace or of one run, for the commands and the exit handler of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from podscale.kubernetes import job_state
from podscale.kubernetes.client import ClusterClient, delete_job
from podscale.kubernetes.errors import ApiError
from podscale.kubernetes.job_spec import NAME_LABEL, RUN_LABEL, STAGE_LABEL
from podscale.kubernetes.job_state import JobState, pods_of_job, read_job_state
from podscale.kubernetes.job_watcher import read_events_and_workload
from podscale.kubernetes.pod_state import creation_time, find_problem, name_of, restart_count, stage_exits, trim_pod
from podscale.kubernetes.resources import JOB_KINDS, PODS, KubernetesObject, ResourceKind
from podscale.kubernetes.submit import LAUNCHER_ANNOTATION, PIPELINE_LAUNCHER, identity_of_job


@dataclass(frozen=True)
class JobEntry:
    """One job: of which run and stage, how it stands, and its pods."""

    resource: ResourceKind
    job: KubernetesObject
    state: JobState
    pods: Sequence[KubernetesObject]

    @property
    def run(self) -> str:
        return str(self.job["metadata"]["labels"].get(RUN_LABEL, ""))

    @property
    def stage(self) -> str:
        return str(self.job["metadata"]["labels"].get(STAGE_LABEL, ""))

    def to_json(self) -> dict[str, Any]:
        ending = self.state.stage_exit
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


def list_jobs(api: ClusterClient, run: str | None = None, stage: str | None = None) -> list[JobEntry]:
    """Return the jobs of the namespace, of one run, or of one stage of it, by age.

    The reason why a job waits is fetched only for one run.
    """
    jobs = list_job_objects(api, run, stage)
    if not jobs:
        return []
    pods, _ = api.list(PODS, labels=_label_selector(run, stage), keep=trim_pod)
    return sorted(
        (_build_entry(api, resource, job, pods, with_events=run is not None) for resource, job in jobs),
        key=lambda entry: creation_time(entry.job),
    )


def list_job_objects(
    api: ClusterClient, run: str | None = None, stage: str | None = None
) -> list[tuple[ResourceKind, KubernetesObject]]:
    """The jobs alone, of all kinds.

    Raises ApiError where there seem to be none, but the cluster has a kind that these credentials may not list.
    """
    found: list[tuple[ResourceKind, KubernetesObject]] = []
    hidden: list[ApiError] = []
    for resource in JOB_KINDS.values():
        try:
            jobs, _ = api.list(resource, labels=_label_selector(run, stage))
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


def _label_selector(run: str | None, stage: str | None) -> str:
    wanted = [f"{NAME_LABEL}=podscale", f"{RUN_LABEL}={run}" if run else RUN_LABEL]
    return ",".join([*wanted, f"{STAGE_LABEL}={stage}"] if stage else wanted)


def _build_entry(
    api: ClusterClient,
    resource: ResourceKind,
    job: KubernetesObject,
    pods: Sequence[KubernetesObject],
    *,
    with_events: bool,
) -> JobEntry:
    wanted = {name: job["metadata"]["labels"].get(name) for name in (RUN_LABEL, STAGE_LABEL)}
    own = [
        pod
        for pod in pods_of_job(job, pods)
        if all((pod["metadata"].get("labels") or {}).get(name) == value for name, value in wanted.items())
    ]
    state = read_job_state(job, own)
    if with_events and state.phase not in ("running", "stopped") and not state.is_finished:
        state = read_job_state(job, own, *read_events_and_workload(api, job, own))
    return JobEntry(resource, job, state, own)


def _pod_json(pod: KubernetesObject) -> dict[str, Any]:
    return {
        "name": name_of(pod),
        "node": (pod.get("spec") or {}).get("nodeName"),
        "phase": (pod.get("status") or {}).get("phase", "Unknown"),
        "restarts": restart_count(pod),
        "reason": describe_pod(pod),
    }


def describe_pod(pod: KubernetesObject) -> str:
    """Return in one line why a pod does not run or how it ended; empty if it runs normally."""
    why = find_problem(pod)
    if why is not None:
        return why.reason
    last = next(stage_exits(pod), None)
    return "" if last is None or last.exit_code == 0 else f"exit code {last.exit_code}: {last.first_line}"


FoundJob = tuple[ResourceKind, KubernetesObject]


@dataclass(frozen=True)
class StopResult:
    """Stopped jobs of a run, and jobs that were left because they belong to another document."""

    stopped: tuple[FoundJob, ...]
    others: tuple[FoundJob, ...]


def stop_jobs(
    api: ClusterClient,
    run: str,
    stage: str | None = None,
    *,
    identity: str | None = None,
    include_finished: bool = False,
) -> StopResult:
    """Deletes the jobs of a run that are at work: their pods save and end. include_finished: those that have ended,
    too.

    identity: of the only document whose jobs are meant. Jobs that somebody else deleted meanwhile are left out.
    Raises ApiError where jobs may be there that these credentials may not see or delete.
    """
    meant = [
        job
        for job in list_job_objects(api, run, stage)
        if include_finished or not job_state.read_job_state(job[1]).is_finished
    ]
    own = [job for job in meant if identity in (None, identity_of_job(job[1]))]
    stopped = [job for job in own if delete_job(api, job[0], name_of(job[1]), str(job[1]["metadata"]["uid"]))]
    return StopResult(tuple(stopped), tuple(job for job in meant if job not in own))


def is_resubmitted(job: FoundJob) -> bool:
    """Whether a task of a pipeline waits for the job, and submits it again."""
    return (job[1]["metadata"].get("annotations") or {}).get(
        LAUNCHER_ANNOTATION
    ) == PIPELINE_LAUNCHER and not job_state.read_job_state(job[1]).is_finished


def job_title(job: FoundJob) -> str:
    """Kind and name."""
    return f"{job[0].kind} {name_of(job[1])}"
