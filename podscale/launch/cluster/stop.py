"""Stopping the jobs of a run: for the command, and for the exit handler of a pipeline."""

from dataclasses import dataclass

from podscale.launch.cluster import state
from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.listing import list_job_objects
from podscale.launch.cluster.pods import name_of
from podscale.launch.cluster.removal import delete_job
from podscale.launch.cluster.resources import KubernetesObject, ResourceKind
from podscale.launch.cluster.submit import LAUNCHER_ANNOTATION, PIPELINE_LAUNCHER, identity_of_job

FoundJob = tuple[ResourceKind, KubernetesObject]


@dataclass(frozen=True)
class StopResult:
    """What became of the jobs of a run: stopped ones, and those that were left because they are of another document."""

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
        if include_finished or not state.read_job_state(job[1]).is_finished
    ]
    own = [job for job in meant if identity in (None, identity_of_job(job[1]))]
    stopped = [job for job in own if delete_job(api, job[0], name_of(job[1]), str(job[1]["metadata"]["uid"]))]
    return StopResult(tuple(stopped), tuple(job for job in meant if job not in own))


def is_resubmitted(job: FoundJob) -> bool:
    """Whether a task of a pipeline waits for the job, and submits it again."""
    return (job[1]["metadata"].get("annotations") or {}).get(
        LAUNCHER_ANNOTATION
    ) == PIPELINE_LAUNCHER and not state.read_job_state(job[1]).is_finished


def job_title(job: FoundJob) -> str:
    """Kind and name."""
    return f"{job[0].kind} {name_of(job[1])}"
