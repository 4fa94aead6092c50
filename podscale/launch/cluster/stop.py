"""Stopping the jobs of a run: for the command, and for the exit handler of a pipeline."""

from dataclasses import dataclass

from podscale.launch.cluster import state as states
from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.listing import jobs_of
from podscale.launch.cluster.pods import name_of
from podscale.launch.cluster.removal import delete
from podscale.launch.cluster.resources import Object, Resource
from podscale.launch.cluster.submit import LAUNCHER, PIPELINE, identity_of

Job = tuple[Resource, Object]


@dataclass(frozen=True)
class Halt:
    """What became of the jobs of a run: stopped ones, and those that were left because they are of another document."""

    stopped: tuple[Job, ...]
    others: tuple[Job, ...]


def stop_jobs(
    api: ClusterClient, run: str, stage: str | None = None, *, identity: str | None = None, ended: bool = False
) -> Halt:
    """Deletes the jobs of a run that are at work: their pods save and end. ended: those that have ended, too.

    identity: of the only document whose jobs are meant. Jobs that somebody else deleted meanwhile are left out.
    Raises ApiError where jobs may be there that these credentials may not see or delete.
    """
    meant = [job for job in jobs_of(api, run, stage) if ended or not states.read(job[1]).ended]
    own = [job for job in meant if identity in (None, identity_of(job[1]))]
    stopped = [job for job in own if delete(api, job[0], name_of(job[1]), str(job[1]["metadata"]["uid"]))]
    return Halt(tuple(stopped), tuple(job for job in meant if job not in own))


def comes_back(job: Job) -> bool:
    """Whether a task of a pipeline waits for the job, and submits it again."""
    return (job[1]["metadata"].get("annotations") or {}).get(LAUNCHER) == PIPELINE and not states.read(job[1]).ended


def told(job: Job) -> str:
    """Kind and name."""
    return f"{job[0].kind} {name_of(job[1])}"
