"""State of a job (a phase and a reason), by pure functions of API objects, for all kinds of job."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from podscale.kubernetes.job_spec import RUN_LABEL, STAGE_LABEL
from podscale.kubernetes.pod_state import (
    PodProblem,
    StageExit,
    find_problem,
    has_run,
    interrupted_exit,
    is_running,
    restart_count,
    root_cause,
)
from podscale.kubernetes.quota import refused_pods_problem
from podscale.kubernetes.resources import (
    KubernetesObject,
    conditions_of,
    creation_time,
    is_being_deleted,
    labels_of,
    name_of,
)
from podscale.kubernetes.workload_state import describe_wait, wait_code
from podscale.util.formatting import format_count, one_line

JobPhase = Literal["queued", "pending", "starting", "running", "restarting", "succeeded", "failed", "stopped", "gone"]
FINISHED_PHASES: tuple[JobPhase, ...] = ("succeeded", "failed", "gone")

DONE_CONDITIONS = ("Succeeded", "Complete", "Completed")
"""Condition of a job that succeeded: of PyTorchJob and JAXJob, of Job and TrainJob, of JobSet."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PROBLEM_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
"""Reasons of events for why a pod does not start, which its status does not show."""

REFUSED_POD = re.compile(r'(Error creating: )?pods? "[^"]*" is forbidden: ')
"""Start of an event about a refused pod, with its name, which differs between the pods of a job."""
LIMIT_RANGE_ADVICE = "set launch.resources.cpus and launch.resources.memory_gib within it"


@dataclass(frozen=True)
class JobState:
    """State of a job.

    Args:
        running: number of running pods.
        expected: number of pods that the job requests.
        stage_exit: exit of the stage, or its exit before the last restart.
        is_permanent: the job waits for a person to fix its cause.
        has_run: a container of the stage has run, according to the job and its remaining pods.
        topic: what the reason is about (see PodProblem); "" if each reason is a problem of its own.
        kueue_reason: Kueue's code for why it keeps the job suspended, such as `Preempted` or `Pending`; "" if it does
            not.
    """

    phase: JobPhase
    reason: str = ""
    running: int = 0
    expected: int = 0
    restarts: int = 0
    stage_exit: StageExit | None = None
    is_permanent: bool = False
    has_run: bool = False
    topic: str = ""
    kueue_reason: str = ""

    @property
    def is_finished(self) -> bool:
        return self.phase in FINISHED_PHASES

    def __str__(self) -> str:
        parts: list[str] = [self.phase]
        if self.phase in ("pending", "starting", "running", "restarting") and self.expected:
            parts.append(f"{self.running} of {format_count(self.expected, 'pod')}")
        if self.restarts:
            parts.append(format_count(self.restarts, "restart"))
        return ", ".join(parts) + (f": {self.reason}" if self.reason else "")


def read_job_state(
    job: KubernetesObject | None,
    pods: Sequence[KubernetesObject] = (),
    events: Sequence[KubernetesObject] = (),
    workload: KubernetesObject | None = None,
    preemptor: KubernetesObject | None = None,
) -> JobState:
    """Return the state of a job.

    Args:
        events: events of the job, of the objects that it owns, and of its pods.
        workload: Kueue's Workload of the job.
        preemptor: Workload of the job for which Kueue preempted this one.
    """
    if job is None:
        return JobState("gone", "there is no such job")
    pods = pods_of_job(job, pods)
    state = JobState(
        "running",
        running=sum(map(is_running, pods)),
        expected=expected_pods(job),
        restarts=_restart_count(job, pods),
        stage_exit=root_cause(pods),
        has_run=_has_run(job) or any(map(has_run, pods)),
    )
    conditions = _true_conditions(job)
    if any(name in conditions for name in DONE_CONDITIONS):
        interrupted = interrupted_exit(pods)
        if interrupted is not None:
            return replace(state, phase="failed", reason=interrupted.first_line, stage_exit=interrupted)
        return replace(state, phase="succeeded", stage_exit=StageExit(0, "", ""))
    if "Failed" in conditions:
        return replace(state, phase="failed", reason=_failure_reason(conditions["Failed"], state.stage_exit))
    if is_being_deleted(job):
        return replace(state, phase="stopped", reason="it is being deleted; its pods save and exit")
    if _is_suspended(job):
        return _suspended_state(job, state, workload, preemptor)
    phase, problem = _active_state(job, pods, events, state)
    if problem is None:
        return replace(state, phase=phase)
    return replace(state, phase=phase, reason=problem.reason, is_permanent=problem.is_permanent, topic=problem.topic)


def pods_of_job(job: KubernetesObject, pods: Sequence[KubernetesObject]) -> list[KubernetesObject]:
    """Return the pods of this job, without those of an earlier job of the same name."""
    since = creation_time(job)
    return [pod for pod in pods if creation_time(pod) >= since]


def pod_selector(job: KubernetesObject) -> str:
    """Return the label selector of the pods of a run's stage."""
    labels = labels_of(job)
    return ",".join(f"{name}={labels[name]}" for name in (RUN_LABEL, STAGE_LABEL) if name in labels)


def expected_pods(job: KubernetesObject) -> int:
    spec = job.get("spec") or {}
    match job["kind"]:
        case "PyTorchJob" | "JAXJob":
            roles = spec.get("pytorchReplicaSpecs") or spec.get("jaxReplicaSpecs") or {}
            return sum(int(role.get("replicas", 1)) for role in roles.values())
        case "TrainJob":
            return int((spec.get("trainer") or {}).get("numNodes", 1))
        case "JobSet":
            return sum(
                int(child.get("replicas", 1)) * int(child["template"]["spec"].get("parallelism", 1))
                for child in spec.get("replicatedJobs") or ()
            )
        case _:
            return int(spec.get("parallelism", 1))


def _true_conditions(job: KubernetesObject) -> dict[str, KubernetesObject]:
    return {name: condition for name, condition in conditions_of(job).items() if condition.get("status") == "True"}


def _failure_reason(condition: KubernetesObject, cause: StageExit | None) -> str:
    """Return the error of the stage, else the operator's message; both if the job took too long."""
    reason, message = str(condition.get("reason") or ""), one_line(str(condition.get("message") or ""))
    error = cause.first_line if cause is not None else ""
    if "Deadline" in reason or "active longer than" in message:
        return f"it took longer than launch.time_limit_hours allows ({message})" + (f"; {error}" if error else "")
    return error or message or reason


def _is_suspended(job: KubernetesObject) -> bool:
    spec = job.get("spec") or {}
    return bool((spec.get("runPolicy") or spec).get("suspend"))


def _suspended_state(
    job: KubernetesObject, state: JobState, workload: KubernetesObject | None, preemptor: KubernetesObject | None
) -> JobState:
    queue = labels_of(job).get(QUEUE_LABEL)
    if workload is not None:
        queue = queue or str((workload.get("spec") or {}).get("queueName", ""))
        reason = describe_wait(workload, queue, preemptor)
        return replace(state, phase="queued", reason=reason, kueue_reason=wait_code(workload))
    if queue:
        reason = f"Kueue has no workload for it yet (queue {queue}), or does not manage {job['kind']} here"
        return replace(state, phase="queued", reason=reason)
    return replace(state, phase="stopped", reason="it is suspended; set spec.suspend to false to resume it")


def _restart_count(job: KubernetesObject, pods: Sequence[KubernetesObject]) -> int:
    jobset_restarts = int((job.get("status") or {}).get("restarts") or 0)
    return jobset_restarts + max(map(restart_count, pods), default=0)


def _has_run(job: KubernetesObject) -> bool:
    """Return whether pods of the job have run, even if they are gone: operators keep past conditions, set to false."""
    status = job.get("status") or {}
    past = {"Running", "Restarting"} & conditions_of(job).keys()
    return bool(past or any(map(status.get, ("failed", "succeeded", "restarts"))))


def _active_state(
    job: KubernetesObject, pods: Sequence[KubernetesObject], events: Sequence[KubernetesObject], state: JobState
) -> tuple[JobPhase, PodProblem | None]:
    """Return phase and problem of a job that is neither finished nor suspended."""
    succeeded = sum((pod.get("status") or {}).get("phase") == "Succeeded" for pod in pods)
    if pods and state.running + succeeded >= state.expected:
        return "running", None
    problem = _first_problem(job, pods, events)
    cause = state.stage_exit  # of a container that has exited, and may not count as restarted yet
    if cause is not None or state.restarts or {"Restarting", "RestartingJobSet"} & _true_conditions(job).keys():
        if problem is None and cause is not None and cause.error:
            problem = PodProblem(f"{cause.pod}: {cause.first_line}")
        return "restarting", problem
    if not pods or any(not (pod.get("spec") or {}).get("nodeName") for pod in pods):
        return "pending", problem
    return "starting", problem


def _first_problem(
    job: KubernetesObject, pods: Sequence[KubernetesObject], events: Sequence[KubernetesObject]
) -> PodProblem | None:
    """Return the worst problem of the pods, else why pods cannot be created, else the problem of another event."""
    problems = [(pod, problem) for pod in pods if (problem := find_problem(pod)) is not None]
    if problems:
        pod, worst = max(problems, key=lambda pair: pair[1].is_permanent)
        others = f" (and {format_count(len(problems) - 1, 'other pod')})" if len(problems) > 1 else ""
        return replace(worst, reason=f"{name_of(pod)}: {worst.reason}{others}")
    if len(pods) < expected_pods(job):
        for message in _event_messages(events, lambda reason: reason.startswith("FailedCreate")):
            return _rejected_pods_problem(message, expected_pods(job))
    return next((PodProblem(text) for text in _event_messages(events, lambda reason: reason in PROBLEM_EVENTS)), None)


def _rejected_pods_problem(message: str, pods: int) -> PodProblem:
    if "violates PodSecurity" in message:
        advice = "set launch.cluster.security=restricted, or use a namespace that allows what the pods need"
        if "init-pytorch" in message:
            advice = (
                "the operator's init container has no security context: give the operator a template with one "
                "(`podscale doctor --cluster`), or let the job have workers only"
            )
        return PodProblem(f"the namespace's Pod Security refuses its pods: {message}; {advice}", is_permanent=True)
    message = REFUSED_POD.sub("", message)
    if "exceeded quota" in message or "failed quota" in message:
        return refused_pods_problem(message, pods)
    advice = f"; {LIMIT_RANGE_ADVICE}" if " usage per " in message else ""
    return PodProblem(
        f"its pods cannot be created: {message}{advice}", is_permanent="is forbidden" in message or bool(advice)
    )


def _event_messages(events: Sequence[KubernetesObject], reasons: Callable[[str], bool]) -> Iterator[str]:
    """Yield the messages of warnings with one of the reasons, newest first."""
    warnings = [event for event in events if event.get("type") == "Warning" and reasons(str(event.get("reason")))]
    for event in sorted(warnings, key=event_time, reverse=True):
        yield one_line(str(event.get("message") or event["reason"]))


def event_time(event: KubernetesObject) -> str:
    """Return the time when an event last happened; "" if it has none."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")
