"""List and stop the jobs of a namespace or of one run, for the commands and the exit handler of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from podscale.kubernetes.client import ClusterClient, delete_object
from podscale.kubernetes.errors import ApiError
from podscale.kubernetes.job_spec import NAME_LABEL, RUN_LABEL, STAGE_LABEL, is_pipeline_job
from podscale.kubernetes.job_state import JobState, pods_of_job, read_job_state
from podscale.kubernetes.job_watcher import read_details
from podscale.kubernetes.pod_state import find_problem, read_pod_starts, restart_count, stage_exits, trim_pod
from podscale.kubernetes.resources import (
    JOB_KINDS,
    PODS,
    KubernetesObject,
    creation_time,
    labels_of,
    name_of,
)
from podscale.kubernetes.submit import identity_of_job
from podscale.runs.job_start import JobStart


@dataclass(frozen=True)
class JobEntry:
    job: KubernetesObject
    state: JobState
    pods: Sequence[KubernetesObject]

    @property
    def kind(self) -> str:
        return str(self.job["kind"])

    @property
    def run(self) -> str:
        return labels_of(self.job).get(RUN_LABEL, "")

    @property
    def stage(self) -> str:
        return labels_of(self.job).get(STAGE_LABEL, "")

    @property
    def start(self) -> JobStart | None:
        """Start of the pods; None if one has not started, or if the job has restarted."""
        return read_pod_starts(self.job, self.pods) if len(self.pods) >= self.state.expected else None

    def to_json(self) -> dict[str, Any]:
        stage_exit, start = self.state.stage_exit, self.start
        return {
            "run": self.run,
            "stage": self.stage,
            "kind": self.kind,
            "name": name_of(self.job),
            "created": self.job["metadata"]["creationTimestamp"],
            "phase": self.state.phase,
            "reason": self.state.reason,
            "kueue_reason": self.state.kueue_reason,
            "running": self.state.running,
            "wanted": self.state.expected,
            "restarts": self.state.restarts,
            "exit_code": stage_exit.exit_code if stage_exit else None,
            "error": stage_exit.error if stage_exit else "",
            "start": start.to_json() if start is not None else None,
            "pods": [_pod_json(pod) for pod in self.pods],
        }


def list_jobs(api: ClusterClient, run: str | None = None, stage: str | None = None) -> list[JobEntry]:
    """Return the jobs of the namespace, of one run, or of one stage of it, oldest first.

    The reason why a job waits is fetched only if `run` is given.
    """
    jobs = list_job_objects(api, run, stage)
    if not jobs:
        return []
    pods, _ = api.list(PODS, labels=_label_selector(run, stage), keep=trim_pod)
    entries = [_build_entry(api, job, pods, with_events=run is not None) for job in jobs]
    return sorted(entries, key=lambda entry: creation_time(entry.job))


def list_job_objects(api: ClusterClient, run: str | None = None, stage: str | None = None) -> list[KubernetesObject]:
    """Return the jobs of all kinds, without their state.

    Raises ApiError if no job is visible and these credentials may not list a kind that the cluster serves.
    """
    jobs: list[KubernetesObject] = []
    hidden: list[ApiError] = []
    for resource in JOB_KINDS.values():
        try:
            items, _ = api.list(resource, labels=_label_selector(run, stage))
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            if error.status == 403 and api.serves(resource):  # 403 precedes 404
                hidden.append(error)
            continue
        jobs += [job for job in items if not _has_controller(job)]
    if hidden and not jobs:
        raise hidden[0]
    return jobs


def _has_controller(job: KubernetesObject) -> bool:
    """Return True for a job that an operator created for one of ours; it has the same labels.

    The Workflow of a pipeline owns its jobs, but does not control them.
    """
    return any(owner.get("controller") for owner in job["metadata"].get("ownerReferences") or ())


def _label_selector(run: str | None, stage: str | None) -> str:
    labels = [f"{NAME_LABEL}=podscale", f"{RUN_LABEL}={run}" if run else RUN_LABEL]
    return ",".join([*labels, f"{STAGE_LABEL}={stage}"] if stage else labels)


def _build_entry(
    api: ClusterClient, job: KubernetesObject, pods: Sequence[KubernetesObject], *, with_events: bool
) -> JobEntry:
    def stage_labels(item: KubernetesObject) -> list[str | None]:
        return [labels_of(item).get(name) for name in (RUN_LABEL, STAGE_LABEL)]

    pods = [pod for pod in pods_of_job(job, pods) if stage_labels(pod) == stage_labels(job)]
    state = read_job_state(job, pods)
    if with_events and state.phase not in ("running", "stopped") and not state.is_finished:
        state = read_job_state(job, pods, *read_details(api, job, pods))
    return JobEntry(job, state, pods)


def _pod_json(pod: KubernetesObject) -> dict[str, Any]:
    return {
        "name": name_of(pod),
        "node": (pod.get("spec") or {}).get("nodeName"),
        "phase": (pod.get("status") or {}).get("phase", "Unknown"),
        "restarts": restart_count(pod),
        "reason": describe_pod(pod),
    }


def describe_pod(pod: KubernetesObject) -> str:
    """Return one line on why a pod does not run or how it failed; empty if there is no problem."""
    problem = find_problem(pod)
    if problem is not None:
        return problem.reason
    last = next(stage_exits(pod), None)
    return "" if last is None or last.exit_code == 0 else f"exit code {last.exit_code}: {last.first_line}"


def active_jobs(api: ClusterClient, run: str, stage: str | None = None) -> list[KubernetesObject]:
    """Return the jobs of a run that have not ended."""
    return [job for job in list_job_objects(api, run, stage) if not read_job_state(job).is_finished]


@dataclass(frozen=True)
class StopResult:
    """Jobs that this call deleted (`stopped`), and jobs of another document, which it left (`others`)."""

    stopped: Sequence[KubernetesObject]
    others: Sequence[KubernetesObject]


def stop_jobs(
    api: ClusterClient,
    run: str,
    stage: str | None = None,
    *,
    identity: str | None = None,
    include_finished: bool = False,
) -> StopResult:
    """Delete the active jobs of a run: their pods save and exit. Raises ApiError without the permission.

    Args:
        identity: identity of the document whose jobs are stopped; None for any.
    """
    jobs = list_job_objects(api, run, stage) if include_finished else active_jobs(api, run, stage)
    others = [job for job in jobs if identity not in (None, identity_of_job(job))]
    return StopResult([job for job in jobs if job not in others and delete_object(api, job)], others)


def is_resubmitted(job: KubernetesObject) -> bool:
    """Return whether a pipeline task waits for the job and would submit it again."""
    return is_pipeline_job(job) and not read_job_state(job).is_finished
