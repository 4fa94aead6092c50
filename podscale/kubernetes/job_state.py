"""State of a job, from its objects: one phase and one reason.

Pure functions from API objects to state, for the five kinds of job that Podscale renders.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from podscale.kubernetes.pod_state import (
    PodProblem,
    StageExit,
    creation_time,
    find_problem,
    has_run,
    is_running,
    name_of,
    restart_count,
    root_cause,
)
from podscale.kubernetes.resources import KubernetesObject
from podscale.util.formatting import format_count, one_line

JobPhase = Literal["queued", "pending", "starting", "running", "restarting", "succeeded", "failed", "stopped", "gone"]
FINISHED_PHASES: tuple[JobPhase, ...] = ("succeeded", "failed", "gone")

DONE_CONDITIONS = ("Succeeded", "Complete", "Completed")
"""PyTorchJob and JAXJob; Job and TrainJob; JobSet."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PROBLEM_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
"""What keeps a pod from starting without its status saying so."""


@dataclass(frozen=True)
class JobState:
    """State of a job.

    `running` counts running pods of `wanted`. `stage_exit` is the exit of the stage, or that before its last restart.
    """

    phase: JobPhase
    reason: str = ""
    running: int = 0
    wanted: int = 0
    restarts: int = 0
    stage_exit: StageExit | None = None
    is_permanent: bool = False
    """Waiting is in vain until somebody changes something."""
    has_run: bool = False
    """Whether a container of the stage has run, as far as job and pods still tell."""

    @property
    def is_finished(self) -> bool:
        return self.phase in FINISHED_PHASES

    def __str__(self) -> str:
        parts: list[str] = [self.phase]
        if self.phase in ("pending", "starting", "running", "restarting") and self.wanted:
            parts.append(f"{self.running} of {format_count(self.wanted, 'pod')}")
        if self.restarts:
            parts.append(format_count(self.restarts, "restart"))
        return ", ".join(parts) + (f": {self.reason}" if self.reason else "")


def read_job_state(
    job: KubernetesObject | None,
    pods: Sequence[KubernetesObject] = (),
    events: Sequence[KubernetesObject] = (),
    workload: KubernetesObject | None = None,
) -> JobState:
    """Return the state of a job.

    Args:
        events: Events of the job, of the objects it owns, and of its pods.
        workload: Workload of Kueue, None without one.
    """
    if job is None:
        return JobState("gone", "there is no such job")
    own = pods_of_job(job, pods)
    wanted, restarts = wanted_pods(job), _restart_count(job, own)
    running = sum(map(is_running, own))
    culprit = root_cause(own)
    ran = _has_run(job) or any(map(has_run, own))

    def state(
        phase: JobPhase, reason: str = "", *, ending: StageExit | None = culprit, hopeless: bool = False
    ) -> JobState:
        return JobState(phase, reason, running, wanted, restarts, ending, hopeless, ran)

    finished = _finished_phase(job)
    if finished is not None and finished["type"] in DONE_CONDITIONS:
        return state("succeeded", ending=StageExit(0, "", ""))
    if finished is not None:
        return state("failed", _failure_reason(finished, culprit))
    if "deletionTimestamp" in job["metadata"]:
        return state("stopped", "its pods have time to save, then it is gone")
    if _is_suspended(job):
        return state(*_suspended_reason(job, workload))
    phase, why = _active_state(job, own, events, running)
    return state(phase, why.reason if why else "", hopeless=why is not None and why.is_permanent)


def pods_of_job(job: KubernetesObject, pods: Sequence[KubernetesObject]) -> list[KubernetesObject]:
    """Return the pods of this job, without those of an earlier job of the same name."""
    since = creation_time(job)
    return [pod for pod in pods if creation_time(pod) >= since]


def wanted_pods(job: KubernetesObject) -> int:
    """Return the number of pods that a job asks for."""
    spec = job.get("spec") or {}
    match job["kind"]:
        case "PyTorchJob" | "JAXJob":
            kinds = spec.get("pytorchReplicaSpecs") or spec.get("jaxReplicaSpecs") or {}
            return sum(int(kind.get("replicas", 1)) for kind in kinds.values())
        case "TrainJob":
            return int((spec.get("trainer") or {}).get("numNodes", 1))
        case "JobSet":
            return sum(
                int(part.get("replicas", 1)) * int(part["template"]["spec"].get("parallelism", 1))
                for part in spec.get("replicatedJobs") or ()
            )
        case _:
            return int(spec.get("parallelism", 1))


def _true_conditions(thing: KubernetesObject) -> dict[str, KubernetesObject]:
    """The conditions that hold, by type."""
    listed = (thing.get("status") or {}).get("conditions") or ()
    return {str(found["type"]): found for found in listed if found.get("status") == "True"}


def _finished_phase(job: KubernetesObject) -> KubernetesObject | None:
    holding = _true_conditions(job)
    return next((holding[name] for name in (*DONE_CONDITIONS, "Failed") if name in holding), None)


def _failure_reason(condition: KubernetesObject, cause: StageExit | None) -> str:
    """The operator's reason where it says more than that a pod failed, then the culprit's own words."""
    reason, message = str(condition.get("reason") or ""), one_line(str(condition.get("message") or ""))
    told = cause.first_line if cause is not None else ""
    if "Deadline" in reason or "active longer than" in message:
        return f"it took longer than launch.time_limit_hours allows ({message})" + (f"; {told}" if told else "")
    return told or message or reason


def _is_suspended(job: KubernetesObject) -> bool:
    spec = job.get("spec") or {}
    return bool((spec.get("runPolicy") or spec).get("suspend"))


def _suspended_reason(job: KubernetesObject, workload: KubernetesObject | None) -> tuple[JobPhase, str]:
    queue = (job["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    if workload is not None:
        return "queued", _queued_reason(workload, queue or str((workload.get("spec") or {}).get("queueName", "")))
    if queue:
        return "queued", f"Kueue has not looked at it yet (queue {queue}); does Kueue manage {job['kind']} here?"
    return "stopped", "somebody suspended it (spec.suspend); set that to false to let it go on"


def _queued_reason(workload: KubernetesObject, queue: str) -> str:
    listed = {str(found["type"]): found for found in (workload.get("status") or {}).get("conditions") or ()}
    for name, status, words in (
        ("Evicted", "True", "taken out again by Kueue"),
        ("QuotaReserved", "False", "waits for quota"),
        ("Admitted", "False", "waits for admission"),
    ):
        found = listed.get(name)
        if found is not None and found.get("status") == status:
            return f"{words} (queue {queue}): {one_line(str(found.get('message') or found.get('reason')))}"
    return f"waits in queue {queue}"


def _restart_count(job: KubernetesObject, pods: Sequence[KubernetesObject]) -> int:
    whole = int((job.get("status") or {}).get("restarts") or 0)  # of a JobSet
    return whole + max(map(restart_count, pods), default=0)


def _has_run(job: KubernetesObject) -> bool:
    """What operators keep of pods that are gone: a condition that holds no more stays listed as false."""
    status = job.get("status") or {}
    listed = {str(found["type"]) for found in status.get("conditions") or ()}
    return bool(listed & {"Running", "Restarting"} or any(map(status.get, ("failed", "succeeded", "restarts"))))


def _active_state(
    job: KubernetesObject, pods: Sequence[KubernetesObject], events: Sequence[KubernetesObject], running: int
) -> tuple[JobPhase, PodProblem | None]:
    """Phase and trouble of a job that has neither ended nor been suspended."""
    done = sum((pod.get("status") or {}).get("phase") == "Succeeded" for pod in pods)
    if pods and running + done >= wanted_pods(job):
        return "running", None
    why = _first_problem(job, pods, events)
    holding = _true_conditions(job)
    failed = root_cause(pods) is not None  # a container that has just ended, and is not counted as restarted yet
    if failed or _restart_count(job, pods) or "Restarting" in holding or "RestartingJobSet" in holding:
        return "restarting", why or _newest_exit(pods)
    if not pods or any(not (pod.get("spec") or {}).get("nodeName") for pod in pods):
        return "pending", why
    return "starting", why


def _first_problem(
    job: KubernetesObject, pods: Sequence[KubernetesObject], events: Sequence[KubernetesObject]
) -> PodProblem | None:
    """What keeps the job from running: the worst of its pods, else pods that could not be made, else other events."""
    found = [(pod, why) for pod in pods if (why := find_problem(pod)) is not None]
    if found:
        pod, why = max(found, key=lambda pair: pair[1].is_permanent)
        others = f" (and {format_count(len(found) - 1, 'other pod')})" if len(found) > 1 else ""
        return PodProblem(f"{name_of(pod)}: {why.reason}{others}", why.is_permanent)
    if len(pods) < wanted_pods(job):
        refused = next(_event_messages(events, lambda reason: reason.startswith("FailedCreate")), None)
        if refused is not None:
            return _rejected_pods_message(refused)
    return next((PodProblem(text) for text in _event_messages(events, lambda reason: reason in PROBLEM_EVENTS)), None)


def _rejected_pods_message(message: str) -> PodProblem:
    if "violates PodSecurity" in message:
        injected = "init-pytorch" in message
        advice = (
            "the operator's own init container has no security context: give the operator a template with one "
            "(`podscale doctor --cluster`), or let the job have workers alone"
            if injected
            else "set launch.cluster.security=restricted, or use a namespace that allows what the pods need"
        )
        return PodProblem(f"the namespace's Pod Security refuses its pods: {message}; {advice}", is_permanent=True)
    if "exceeded quota" in message:
        return PodProblem(f"its pods do not fit the namespace's quota: {message}; ask for less or wait for other jobs")
    return PodProblem(f"its pods cannot be made: {message}", is_permanent="is forbidden" in message)


def _event_messages(events: Sequence[KubernetesObject], reasons: Callable[[str], bool]) -> Iterator[str]:
    """The messages of warnings with a telling reason, the newest first."""
    warnings = [event for event in events if event.get("type") == "Warning" and reasons(str(event.get("reason")))]
    for event in sorted(warnings, key=_event_time, reverse=True):
        yield one_line(str(event.get("message") or event["reason"]))


def _event_time(event: KubernetesObject) -> str:
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")


def _newest_exit(pods: Sequence[KubernetesObject]) -> PodProblem | None:
    culprit = root_cause(pods)
    return PodProblem(f"{culprit.pod}: {culprit.first_line}") if culprit is not None and culprit.error else None
