"""Reasons why Kueue keeps a job, from Workloads as Kueue 0.19 writes them."""

from typing import Any

import pytest

from podscale.kubernetes import workload_state
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.job_state import read_job_state
from podscale.kubernetes.job_watcher import read_details
from podscale.kubernetes.jobs import list_jobs
from tests.support import crds
from tests.support.cluster_objects import condition, job, stored
from tests.support.fake_cluster import FakeCluster

PREEMPTION = (
    "Preempted to accommodate a workload (UID: 8c2d, JobUID: uid-urgent) due to prioritization in the ClusterQueue; "
    "preemptor path: /shared; preemptee path: /shared"
)
NO_QUOTA = (
    "couldn't assign flavors to pod set worker: insufficient unused quota for memory in flavor f, 3Gi more needed"
)
QUEUED: dict[str, Any] = {"labels": {"kueue.x-k8s.io/queue-name": "lq"}, "suspend": True}


def workload(*conditions: dict[str, Any], spec: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    name = {"name": "pytorchjob-r1-1a2b3", "labels": {"kueue.x-k8s.io/job-uid": "uid-r1"}}
    return {"metadata": name, "spec": spec or {}, "status": {"conditions": list(conditions), **status}}


def preempted(quota: str = PREEMPTION, how: str = "InClusterQueue") -> dict[str, Any]:
    return workload(
        condition("QuotaReserved", "False", "Pending", quota),
        condition("Admitted", "False", "NoReservation", "The workload has no reservation"),
        condition("Evicted", "True", "Preempted", PREEMPTION),
        condition("Preempted", "True", how, PREEMPTION),
        condition("Requeued", "True", "Preempted", PREEMPTION),
    )


URGENT = {
    "metadata": {
        "name": "pytorchjob-urgent-4c5d6",
        "labels": {"kueue.x-k8s.io/job-uid": "uid-urgent"},
        "ownerReferences": [{"kind": "PyTorchJob", "name": "urgent", "uid": "uid-urgent", "controller": True}],
    }
}


def test_a_preempted_job_names_its_preemptor_and_then_the_missing_quota() -> None:
    at_first = workload_state.describe_wait(preempted(), "lq", URGENT)
    assert "PyTorchJob urgent" in at_first
    assert "quota" not in at_first  # Kueue repeats the eviction's message there until it has tried again
    later = workload_state.describe_wait(preempted(NO_QUOTA), "lq", URGENT)
    assert "PyTorchJob urgent" in later
    assert NO_QUOTA in later


@pytest.mark.parametrize(
    "how", ["InClusterQueue", "InCohortReclamation", "InCohortFairSharing", "InCohortReclaimWhileBorrowing"]
)
def test_every_kind_of_preemption_has_a_description(how: str) -> None:
    assert "Preempted to accommodate" not in workload_state.describe_wait(preempted(how=how), "lq")


def test_an_unknown_kind_of_preemption_is_quoted() -> None:
    assert PREEMPTION in workload_state.describe_wait(preempted(how="InAnotherGalaxy"), "lq")


@pytest.mark.parametrize(
    ("written", "code", "uid"),
    [
        (preempted(), "Preempted", "uid-urgent"),
        (workload(condition("Evicted", "True", "Preempted", "JobUID: UNKNOWN")), "Preempted", ""),
        (workload(condition("Evicted", "True", "PodsReadyTimeout", "JobUID: x")), "PodsReadyTimeout", ""),
        (workload(condition("QuotaReserved", "False", "Pending", NO_QUOTA)), "Pending", ""),
        (workload(condition("QuotaReserved"), condition("Admitted", "False", "Checks")), "Checks", ""),
        (workload(condition("QuotaReserved"), condition("Evicted", "False", "QuotaReserved", PREEMPTION)), "", ""),
        (workload(), "", ""),
    ],
)  # fmt: skip
def test_the_code_and_the_preemptor_are_data(written: dict[str, Any], code: str, uid: str) -> None:
    assert workload_state.wait_code(written) == code
    assert workload_state.preemptor_uid(written) == uid


def test_an_admission_check_is_named_with_its_message() -> None:
    """So Kueue reports a pool that is being provisioned for the job."""
    waiting = {"name": "podscale-capacity", "state": "Pending", "message": "Waiting for resources"}
    ready = {"name": "other", "state": "Ready", "message": ""}
    written = workload(
        condition("QuotaReserved"),
        condition("Admitted", "False", "UnsatisfiedChecks", "The workload has not all checks ready"),
        admissionChecks=[ready, waiting],
    )
    reason = workload_state.describe_wait(written, "lq")
    assert "podscale-capacity" in reason
    assert "Waiting for resources" in reason
    assert "other" not in reason


def test_a_deactivated_workload_names_the_field_to_set() -> None:
    written = workload(
        condition("Evicted", "True", "Deactivated", "The workload is deactivated"),
        condition("QuotaReserved", "False", "Pending", "The workload is deactivated"),
        spec={"active": False},
    )
    assert "spec.active of Workload pytorchjob-r1-1a2b3" in workload_state.describe_wait(written, "lq")


def test_a_backoff_names_the_time_of_the_next_attempt() -> None:
    written = workload(
        condition("Evicted", "True", "PodsReadyTimeout", "Exceeded the PodsReady timeout"),
        condition("QuotaReserved", "False", "Pending", "Exceeded the PodsReady timeout"),
        requeueState={"count": 1, "requeueAt": "2026-11-24T10:00:00Z"},
    )
    assert "2026-11-24T10:00:00Z" in workload_state.describe_wait(written, "lq")


def test_status_finds_the_preemptor_in_the_namespace(api: ClusterClient, cluster: FakeCluster) -> None:
    made = cluster.put("pytorchjobs", job(**QUEUED))
    own = preempted(NO_QUOTA)
    own["metadata"]["labels"]["kueue.x-k8s.io/job-uid"] = made["metadata"]["uid"]
    cluster.put("workloads", own)
    without = read_job_state(made, (), *read_details(api, made, ()))
    assert "another job" in without.reason
    cluster.put("workloads", URGENT)
    (entry,) = list_jobs(api, "r1")
    assert entry.to_json()["phase"] == "queued"
    assert entry.to_json()["kueue_reason"] == "Preempted"
    assert "PyTorchJob urgent" in entry.to_json()["reason"]


def test_a_job_without_kueue_has_no_code() -> None:
    assert read_job_state(stored(job())).kueue_reason == ""


def test_the_workload_of_these_tests_has_the_fields_of_the_real_definition() -> None:
    status = preempted()["status"]
    for entry in status["conditions"]:
        entry["lastTransitionTime"] = "2026-11-24T10:00:00Z"
    crds.validate_status("Workload", status)
