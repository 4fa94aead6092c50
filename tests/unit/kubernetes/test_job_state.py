"""The reported state of a job, from objects as the real API server, operators and kubelets write them."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from podscale.kubernetes import job_state
from tests.support.cluster_objects import (
    condition,
    event,
    job,
    pod,
    stored,
    terminated,
    unschedulable,
    waiting,
)

Object = dict[str, Any]
KINDS = ("PyTorchJob", "JAXJob", "TrainJob", "JobSet", "Job")
QUEUED = {"labels": {"kueue.x-k8s.io/queue-name": "lq"}, "suspend": True}
NO_NODE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
FORBIDDEN = 'pods "r1-worker-1" is forbidden'
REFUSED = (
    'pods "r1-worker-0" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false '
    '(container "init-pytorch" must set securityContext.allowPrivilegeEscalation=false)'
)


@dataclass(frozen=True)
class Case:
    name: str
    job: Object | None
    phase: job_state.JobPhase
    says: str = ""
    pods: tuple[Object, ...] = ()
    events: tuple[Object, ...] = ()
    workload: Object | None = None
    hopeless: bool = False
    exit_code: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


ABANDONED = {
    "terminated": {
        "exitCode": 0,
        "reason": "Completed",
        "message": '{"stage": "train", "exit_code": 75, "error": "launch.cluster.launcher_grace_minutes"}',
    }
}
"""State of a container that found its job abandoned: it exits with 0, and reports the code of a stop."""


def done(kind: str) -> Object:
    name = {"Job": "Complete", "TrainJob": "Complete", "JobSet": "Completed"}.get(kind, "Succeeded")
    return stored(job(kind, status={"conditions": [condition("Created"), condition(name)]}))


def failed(kind: str, message: str = "", reason: str = "") -> Object:
    return stored(job(kind, status={"conditions": [condition("Failed", "True", reason, message)]}))


def workload(*conditions: Object) -> Object:
    return {"metadata": {"name": "pytorchjob-r1-1a2b3"}, "status": {"conditions": list(conditions)}}


LIVE = stored(job())
BAD = terminated(2, "data.source: no such folder")
CASES = [
    Case("a job that is not there is gone", None, "gone", "no such job"),
    *(Case(f"a {kind} that has ended well has succeeded", done(kind), "succeeded", exit_code=0) for kind in KINDS),
    *(
        Case(
            f"a {kind} whose pods have ended because its pipeline is gone has not succeeded",
            done(kind),
            "failed",
            "launcher_grace_minutes",
            pods=(pod(0, phase="Succeeded", state=ABANDONED),),
            exit_code=75,
        )
        for kind in KINDS
    ),
    Case(
        "a job whose pod was restarted before it was done has succeeded",
        done("PyTorchJob"),
        "succeeded",
        pods=(pod(0, phase="Succeeded", state=terminated(0, ""), last=terminated(77, "lost a peer"), restarts=1),),
        exit_code=0,
    ),
    *(
        Case(f"a failed {kind} tells the words of the stage", failed(kind), "failed", "loss is not finite", (
            pod(0, state=terminated(1, "loss is not finite"), phase="Failed"),
            pod(1, state=terminated(77, "rank 0 is lost"), phase="Failed"),
        ), exit_code=1)
        for kind in KINDS
    ),
    Case(
        "a failed job without pods tells the operator's message",
        failed("PyTorchJob", "PyTorchJob r1 is failed because 1 Worker replica(s) failed."),
        "failed",
        "1 Worker replica(s) failed",
    ),
    Case(
        "a job over its time limit names the option",
        failed("Job", "Job was active longer than specified deadline", "DeadlineExceeded"),
        "failed",
        "launch.time_limit_hours",
    ),
    Case("a job that is being deleted is stopped", {
        **LIVE, "metadata": {**LIVE["metadata"], "deletionTimestamp": "2026-11-21T00:00:00Z"}
    }, "stopped", "its pods save and exit", (pod(0), pod(1))),
    Case("a new job without pods is pending", LIVE, "pending"),
    *(
        Case(f"a {kind} with all pods running runs", stored(job(kind)), "running", pods=(pod(0), pod(1)))
        for kind in KINDS
    ),
    Case("a job whose first pod is done and whose second runs is running", LIVE, "running", pods=(
        pod(0, state=terminated(0, "", "Completed"), phase="Succeeded"), pod(1),
    )),
    Case("a job whose pods are all done runs until its operator says so", LIVE, "running", pods=(
        pod(0, state=terminated(0, "", "Completed"), phase="Succeeded"),
        pod(1, state=terminated(0, "", "Completed"), phase="Succeeded"),
    )),
    Case("a pod that makes its container is starting", LIVE, "starting", pods=(
        pod(0), pod(1, state=waiting("ContainerCreating"), phase="Pending"),
    )),
    Case("an unschedulable pod quotes the scheduler", LIVE, "pending", NO_NODE, (
        unschedulable(0, NO_NODE), unschedulable(1, NO_NODE),
    )),
    Case("several unschedulable pods are one sentence", LIVE, "pending", "and 1 other pod", (
        unschedulable(0, NO_NODE), unschedulable(1, NO_NODE),
    )),
    *(
        Case(f"{reason} names the image and is hopeless", LIVE, "starting", says, (
            pod(0, state=waiting(reason, "image not present"), phase="Pending"), pod(1),
        ), hopeless=True)
        for reason, says in (
            ("ImagePullBackOff", "registry.example/podscale:1"),
            ("ErrImagePull", "image_pull_secrets"),
            ("ErrImageNeverPull", "image_pull_policy"),
            ("InvalidImageName", "launch.image"),
        )
    ),
    Case("a missing secret is quoted", LIVE, "starting", 'secret "s" not found', (
        pod(0, state=waiting("CreateContainerConfigError", 'secret "s" not found'), phase="Pending"), pod(1),
    ), hopeless=True),
    Case("a volume that cannot be mounted is told from the pod's event", LIVE, "starting", 'claim "w" not found', (
        pod(0, state=waiting("ContainerCreating"), phase="Pending"), pod(1),
    ), (event("r1-worker-0", "FailedMount", 'claim "w" not found'),)),
    Case("pods that Pod Security refuses are told from the job's event", LIVE, "pending", "Pod Security", events=(
        event("r1", "FailedCreatePod", f"Error creating: {REFUSED}"),
    ), hopeless=True),
    Case("the operator's init container is named as the cause", LIVE, "pending", "podscale doctor --cluster", events=(
        event("r1", "FailedCreatePod", f"Error creating: {REFUSED}"),
    ), hopeless=True),
    Case("pods over the quota are not hopeless", LIVE, "pending", "exceeded quota: q", events=(
        event("r1", "FailedCreatePod", 'Error creating: pods "r1-worker-1" is forbidden: exceeded quota: q'),
    )),
    Case("pods that exceed the quota alone are hopeless", LIVE, "pending", "launch.resources.cpus", events=(
        event("r1", "FailedCreatePod", f"Error creating: {FORBIDDEN}: exceeded quota: q, requested: pods=1,"
              "requests.cpu=4, used: pods=0,requests.cpu=0, limited: pods=9,requests.cpu=2"),
    ), hopeless=True),
    Case("pods that fit the quota alone are not", LIVE, "pending", "wait for other jobs", events=(
        event("r1", "FailedCreatePod", f"Error creating: {FORBIDDEN}: exceeded quota: q, requested: requests.cpu=1, "
              "used: requests.cpu=1500m, limited: requests.cpu=2"),
    )),
    Case("pods without what the quota counts are hopeless", LIVE, "pending", "launch.resources.memory_gib", events=(
        event("r1", "FailedCreatePod", f"Error creating: {FORBIDDEN}: failed quota: q: must specify limits.memory for: "
              "pytorch"),
    ), hopeless=True),
    Case("a limit range names the remedy", LIVE, "pending", "launch.resources.cpus", events=(
        event("r1", "FailedCreatePod", f"Error creating: {FORBIDDEN}: maximum cpu usage per Container is 2, but limit "
              "is 8"),
    ), hopeless=True),
    Case("a crash loop tells how the container ended", LIVE, "restarting", "CUDA error", (
        pod(0, state=waiting("CrashLoopBackOff", "back-off 20s"), last=terminated(1, "CUDA error"), restarts=3),
        pod(1, restarts=2),
    ), exit_code=1),
    Case("a container out of memory names the option", LIVE, "restarting", "launch.resources.memory_gib", (
        pod(0, state=waiting("CrashLoopBackOff"), last=terminated(137, None, "OOMKilled"), restarts=1), pod(1),
    ), exit_code=137),
    Case("all pods running again after a restart is running", LIVE, "running", pods=(
        pod(0, last=terminated(77, "rank 1 is lost"), restarts=1), pod(1, last=terminated(137), restarts=1),
    ), exit_code=137),
    Case("a restarting JobSet says so", stored(job("JobSet", status={
        "restarts": 1, "conditions": [condition("RestartingJobSet")]
    })), "restarting", pods=(pod(0),)),
    Case("an evicted pod tells the node's words", LIVE, "restarting", "low on resource", (
        pod(0, phase="Failed", state=terminated(137), status={
            "reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."
        }), pod(1),
    ), exit_code=1),
    Case("a container that has just failed is restarting before it counts", LIVE, "restarting", "peer lost", (
        pod(0, state=terminated(77, "peer lost")), pod(1),
    ), exit_code=77),
    Case("bad input is found while the operator still restarts", LIVE, "restarting", "no such folder", (
        pod(0, last=BAD, state=waiting("CrashLoopBackOff"), restarts=1), pod(1, last=terminated(77, "peer lost")),
    ), exit_code=2),
    Case("a suspended job of a queue is queued with Kueue's words", stored(job(**QUEUED)), "queued", "1 more needed",
         workload=workload(condition("QuotaReserved", "False", "Pending", "insufficient quota: 1 more needed"))),
    Case("a preempted job of a queue tells that Kueue took it out", stored(job(**QUEUED)), "queued", "evicted by Kueue",
         workload=workload(condition("Evicted", "True", "Preempted", "Preempted to accommodate a workload"))),
    Case("a job that waits for an admission check is queued", stored(job(**QUEUED)), "queued", "waits for admission",
         workload=workload(
             condition("QuotaReserved"), condition("Admitted", "False", "UnsatisfiedAdmissionChecks", "no capacity")
         )),
    Case("a job that Kueue ignores asks whether it manages the kind", stored(job(**QUEUED)), "queued", "manage"),
    *(
        Case(f"a {kind} suspended by a person is stopped", stored(job(kind, suspend=True)), "stopped", "spec.suspend")
        for kind in KINDS
    ),
    Case("pods of an earlier job of the same name do not count", stored(job(), created="2999-01-01T00:00:00Z"),
         "pending", pods=(pod(0, state=BAD), pod(1))),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_state_of_a_job(case: Case) -> None:
    state = job_state.read_job_state(case.job, case.pods, case.events, case.workload)
    assert state.phase == case.phase, str(state)
    assert case.says in state.reason
    assert state.is_permanent == case.hopeless
    assert (state.stage_exit.exit_code if state.stage_exit else None) == case.exit_code


def test_a_quota_s_refusal_reads_the_same_for_every_pod() -> None:
    def state(pod: str) -> job_state.JobState:
        refused = f'Error creating: pods "{pod}" is forbidden: exceeded quota: q'
        return job_state.read_job_state(LIVE, events=(event("r1", "FailedCreatePod", refused),))

    assert state("r1-worker-0") == state("r1-worker-1")
    assert state("r1-worker-0").topic


def test_both_texts_of_an_image_that_cannot_be_pulled_have_one_topic() -> None:
    reasons = ("ErrImagePull", "ImagePullBackOff")
    states = [job_state.read_job_state(LIVE, [pod(0, state=waiting(reason), phase="Pending")]) for reason in reasons]
    assert states[0].topic == states[1].topic != ""
    assert job_state.read_job_state(LIVE, [pod(0, state=waiting("CreateContainerError"), phase="Pending")]).topic == ""


def test_the_first_cause_explains_the_others() -> None:
    ends = [(77, "peer lost"), (76, "hang"), (1, "loss is not finite"), (2, "bad document")]
    for number in range(len(ends)):
        pods = [pod(index, state=terminated(*end)) for index, end in enumerate(ends[: number + 1])]
        state = job_state.read_job_state(LIVE, pods).stage_exit
        assert state is not None
        assert (state.exit_code, state.error) == ends[number]


def test_an_error_of_many_lines_is_one_line_in_a_state() -> None:
    pods = [pod(0, state=terminated(1, "loss is not finite\n  at step 12\nlower the rate"), phase="Failed")]
    assert str(job_state.read_job_state(failed("Job"), pods)) == "failed: loss is not finite"


def test_the_line_for_people_counts_pods_and_restarts() -> None:
    state = job_state.read_job_state(
        LIVE, [pod(0, restarts=2), pod(1, state=waiting("ContainerCreating"), phase="Pending")]
    )
    assert str(state).split(", ") == ["restarting", "1 of 2 pods", "2 restarts"]


@pytest.mark.parametrize(
    ("status", "pods", "ran"),
    [
        ({}, [], False),
        ({}, [pod(0, state=waiting("ErrImagePull"))], False),
        ({}, [pod(0)], True),
        ({}, [pod(0, state=waiting("ErrImagePull"), last=terminated(1))], True),
        ({}, [pod(0, state=waiting("RunContainerError"), last=terminated(128, reason="StartError"))], False),
        ({"conditions": [condition("Created"), condition("Running", "False")]}, [], True),
        ({"failed": 1}, [pod(0, state=waiting("ErrImagePull"))], True),
        ({"restarts": 1}, [], True),
    ],
)
def test_pods_and_status_show_if_a_job_ever_ran(status: dict[str, Any], pods: list[dict[str, Any]], ran: bool) -> None:
    assert job_state.read_job_state(stored(job(status=status), created="2026-01-01T00:00:00Z"), pods).has_run is ran
