"""Submitting: one job of this document in any case, and no objects left if the job is refused."""

import threading
from typing import Any

import pytest

from podscale.errors import ABSENT
from podscale.kubernetes import submit
from podscale.kubernetes.client import ClusterClient, connect_cluster
from podscale.kubernetes.errors import ApiError, KindNotServed
from podscale.kubernetes.render import JobManifests
from podscale.kubernetes.resources import resource_of
from podscale.kubernetes.retry import RetryPolicy
from podscale.kubernetes.submit import Submission, dry_run_job, submit_job
from podscale.kubernetes.transport import NamedCluster
from tests.support.cluster_objects import LABELS, condition, job, pod, terminated
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_state import Answer, Seen
from tests.support.refusals import refused

POLICY: dict[str, Any] = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "r1", "labels": LABELS},
    "spec": {},
}
RUNTIME = {**POLICY, "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime"}
MANIFESTS = JobManifests(job(), (POLICY,))


def jobs(cluster: FakeCluster) -> list[str]:
    return [made["metadata"]["uid"] for made in cluster.all("pytorchjobs")]


def finish(cluster: FakeCluster, kind: str, plural: str = "pytorchjobs") -> None:
    made = cluster.get(plural, "r1")
    assert made is not None
    cluster.put(plural, {**made, "status": {"conditions": [condition(kind)]}})


def test_a_dry_run_precedes_the_creation_of_the_job(api: ClusterClient, cluster: FakeCluster) -> None:
    assert submit_job(api, MANIFESTS, print).action == "created"
    posts = [seen for seen in cluster.seen if seen.method == "POST" and seen.path.endswith("pytorchjobs")]
    assert ["dryRun" in seen.query for seen in posts] == [True, False]


def test_owned_objects_are_deleted_with_their_job(api: ClusterClient, cluster: FakeCluster) -> None:
    submissions = submit_job(api, MANIFESTS, print)
    (policy,) = cluster.all("networkpolicies")
    (owner,) = policy["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("PyTorchJob", submissions.job["metadata"]["uid"])
    assert owner["blockOwnerDeletion"] is True  # otherwise an old object may still exist when the next job is created
    cluster.remove("pytorchjobs", "r1")
    assert cluster.all("networkpolicies") == []


def test_a_cluster_that_guards_finalizers_names_the_missing_permission(
    api: ClusterClient, cluster: FakeCluster
) -> None:
    def guard(seen: Seen) -> Answer | None:
        owners = (seen.body.get("metadata") or {}).get("ownerReferences") or ()
        if not any(owner.get("blockOwnerDeletion") for owner in owners):
            return None
        why = "cannot set blockOwnerDeletion if an ownerReference refers to a resource you can't set finalizers on"
        return Answer(403, "Forbidden", f'networkpolicies.networking.k8s.io "r1" is forbidden: {why}: , <nil>')

    cluster.faults.append(guard)
    with refused("finalizers", "podscale doctor --cluster", field="NetworkPolicy r1", kind=ApiError):
        submit_job(api, MANIFESTS, print)
    assert submit_job(api, MANIFESTS, print).action == "adopted"  # with the permission, the same command continues
    (policy,) = cluster.all("networkpolicies")
    assert policy["metadata"]["ownerReferences"][0]["uid"] == jobs(cluster)[0]


@pytest.mark.parametrize("labels", [{}, {**LABELS, "podscale.dev/run": "other"}])
@pytest.mark.parametrize("running", [False, True], ids=["new job", "adopted job"])
def test_a_foreign_object_is_neither_used_nor_taken_over(
    api: ClusterClient, cluster: FakeCluster, labels: dict[str, str], running: bool
) -> None:
    foreign = cluster.put("networkpolicies", {**POLICY, "metadata": {"name": "r1", "labels": labels}})
    if running:
        cluster.put("pytorchjobs", job())
    with refused("run.id", field="NetworkPolicy r1"):
        submit_job(api, MANIFESTS, print)
    assert cluster.all("networkpolicies") == [foreign]
    assert len(jobs(cluster)) == running


def test_leftover_objects_of_an_earlier_job_are_replaced_if_they_differ(
    api: ClusterClient, cluster: FakeCluster
) -> None:
    api.create(resource_of(RUNTIME), {**RUNTIME, "spec": {"of": "an older document"}})
    submit_job(api, JobManifests(job("TrainJob"), (RUNTIME,)), print)
    (made,) = cluster.all("trainingruntimes")
    assert made["spec"] == RUNTIME["spec"]
    finish(cluster, "Failed", "trainjobs")
    submit_job(api, JobManifests(job("TrainJob"), (RUNTIME,)), print)
    (again,) = cluster.all("trainingruntimes")
    assert again["spec"] == RUNTIME["spec"]


def test_an_object_just_created_by_another_submitter_of_this_document_is_used(
    api: ClusterClient, cluster: FakeCluster
) -> None:
    (made,) = submit.prepare_owned_objects(api, (POLICY,))
    assert submit.prepare_owned_objects(api, (POLICY,)) == []
    (policy,) = cluster.all("networkpolicies")
    submit_job(api, MANIFESTS, print)
    (owned,) = cluster.all("networkpolicies")
    assert policy["metadata"]["uid"] == owned["metadata"]["uid"]
    assert made["metadata"]["name"] == "r1"


def test_a_trainjobs_runtime_is_there_before_the_job_is_checked(api: ClusterClient, cluster: FakeCluster) -> None:
    def needs_runtime(plural: str, body: dict[str, Any]) -> Answer | None:
        there = cluster.get("trainingruntimes", "r1") is not None
        return None if plural != "trainjobs" or there else Answer(403, "Forbidden", "denied the request: no runtime")

    cluster.admission.append(needs_runtime)
    assert submit_job(api, JobManifests(job("TrainJob"), (RUNTIME,)), print).action == "created"


def test_submitting_again_adopts_the_running_job(api: ClusterClient, cluster: FakeCluster) -> None:
    first = submit_job(api, MANIFESTS, print)
    again = submit_job(api, MANIFESTS, print)
    assert (again.action, again.job["metadata"]["uid"]) == ("adopted", first.job["metadata"]["uid"])


def test_adopting_creates_the_missing_objects_of_a_killed_submitter(api: ClusterClient, cluster: FakeCluster) -> None:
    api.create(first_resource(), job())
    submit_job(api, MANIFESTS, print)
    (policy,) = cluster.all("networkpolicies")
    assert policy["metadata"]["ownerReferences"][0]["uid"] == jobs(cluster)[0]


def first_resource() -> Any:
    return resource_of(job())


def test_a_job_that_succeeded_is_left_alone(api: ClusterClient, cluster: FakeCluster) -> None:
    submit_job(api, MANIFESTS, print)
    finish(cluster, "Succeeded")
    before = jobs(cluster)
    assert submit_job(api, MANIFESTS, print).action == "finished"
    assert jobs(cluster) == before


def test_a_job_that_was_abandoned_by_its_pipeline_is_replaced(
    api: ClusterClient, cluster: FakeCluster, notices: list[str]
) -> None:
    """Its pods exit with 0, so that no operator restarts them, and the operator counts them as successful."""
    submit_job(api, MANIFESTS, print)
    finish(cluster, "Succeeded")
    before = jobs(cluster)
    state = terminated(0, "the launcher is gone")
    state["terminated"]["message"] = state["terminated"]["message"].replace('"exit_code": 0', '"exit_code": 75')
    cluster.put("pods", pod(0, phase="Succeeded", state=state))
    assert submit_job(api, MANIFESTS, notices.append).action == "created"
    assert jobs(cluster) != before


def test_a_job_that_failed_is_replaced(api: ClusterClient, cluster: FakeCluster, notices: list[str]) -> None:
    submit_job(api, MANIFESTS, print)
    finish(cluster, "Failed")
    before = jobs(cluster)
    assert submit_job(api, MANIFESTS, notices.append).action == "created"
    assert len(jobs(cluster)) == 1
    assert jobs(cluster) != before
    assert "PyTorchJob r1" in notices[0]


def test_a_job_that_is_being_deleted_is_waited_for(api: ClusterClient, cluster: FakeCluster) -> None:
    submit_job(api, MANIFESTS, print)
    made = cluster.get("pytorchjobs", "r1")
    assert made is not None
    made["metadata"]["deletionTimestamp"] = "2026-11-21T00:00:00Z"
    cluster.put("pytorchjobs", made)
    threading.Timer(0.3, cluster.remove, ("pytorchjobs", "r1")).start()
    again = submit_job(api, MANIFESTS, print)
    assert again.action == "created"
    assert again.job["metadata"]["uid"] != made["metadata"]["uid"]


def test_another_document_under_the_same_id_is_refused(api: ClusterClient, cluster: FakeCluster) -> None:
    submit_job(api, MANIFESTS, print)
    with refused("podscale stop r1 --delete", field="PyTorchJob r1", got="same"):
        submit_job(api, JobManifests(job(identity="other")), print)


def test_a_foreign_job_is_refused(api: ClusterClient, cluster: FakeCluster) -> None:
    foreign = job()
    foreign["metadata"]["annotations"] = {}
    cluster.put("pytorchjobs", foreign)
    with refused(field="PyTorchJob r1", got=ABSENT):
        submit_job(api, MANIFESTS, print)


def test_the_same_run_as_another_kind_of_job_is_refused(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.put("jobsets", job("JobSet"))
    with refused("podscale stop r1", "launch.backend", field="JobSet r1"):
        submit_job(api, MANIFESTS, print)
    assert jobs(cluster) == []


def test_two_submitters_at_once_create_one_job(cluster: FakeCluster) -> None:
    """Both find no job and create one at the same time; the API server accepts one of them."""
    looked = threading.Barrier(4)

    def both_have_looked(seen: Seen) -> Answer | None:
        if seen.method == "POST" and seen.path.endswith("pytorchjobs") and "dryRun" in seen.query:
            looked.wait(10)
        return None

    cluster.faults.append(both_have_looked)
    submissions: list[Submission] = []
    clients = [connect_cluster(NamedCluster(), policy=RetryPolicy(10, first_pause=0.05)) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda api=api: submissions.append(submit_job(api, MANIFESTS, print)))
        for api in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(one.action for one in submissions) == ["adopted", "adopted", "adopted", "created"]
    assert len({one.job["metadata"]["uid"] for one in submissions}) == len(jobs(cluster)) == 1


def test_a_lost_response_creates_no_second_job(api: ClusterClient, cluster: FakeCluster) -> None:
    """The job is created, but the connection breaks before the answer. The repeated request finds the job."""

    def make_and_cut(seen: Seen) -> Answer | None:
        if seen.method == "POST" and seen.path.endswith("pytorchjobs") and "dryRun" not in seen.query:
            cluster.faults.clear()
            cluster.put("pytorchjobs", seen.body)
            raise ConnectionError
        return None

    cluster.faults.append(make_and_cut)
    assert submit_job(api, MANIFESTS, print).action == "adopted"
    assert len(jobs(cluster)) == 1


@pytest.mark.parametrize("status", [403, 422])
def test_a_refused_job_leaves_nothing_behind(api: ClusterClient, cluster: FakeCluster, status: int) -> None:
    cluster.admission.append(
        lambda plural, body: Answer(status, "Invalid", "denied the request") if plural == "pytorchjobs" else None
    )
    with refused("denied the request", field="PyTorchJob r1", kind=ApiError):
        submit_job(api, MANIFESTS, print)
    assert [seen.path for seen in cluster.seen if seen.method == "POST" and "networkpolicies" in seen.path] == []
    assert jobs(cluster) == []


def test_a_job_that_is_refused_after_its_dry_run_leaves_nothing_behind(
    api: ClusterClient, cluster: FakeCluster
) -> None:
    def refuse_creation(seen: Seen) -> Answer | None:
        creates = seen.method == "POST" and seen.path.endswith("pytorchjobs") and "dryRun" not in seen.query
        return Answer(403, "Forbidden", "exceeded quota") if creates else None

    cluster.faults.append(refuse_creation)
    with refused("exceeded quota", field="PyTorchJob r1", kind=ApiError):
        submit_job(api, MANIFESTS, print)
    assert cluster.all("networkpolicies") == []


def test_the_reason_of_a_refused_job_is_raised_if_its_objects_cannot_be_deleted(
    api: ClusterClient, cluster: FakeCluster
) -> None:
    def refuse(seen: Seen) -> Answer | None:
        if seen.method == "POST" and seen.path.endswith("pytorchjobs") and "dryRun" not in seen.query:
            return Answer(403, "Forbidden", "exceeded quota")
        return Answer(403, "Forbidden", "no right to delete") if seen.method == "DELETE" else None

    cluster.faults.append(refuse)
    with refused("exceeded quota", field="PyTorchJob r1", kind=ApiError):
        submit_job(api, MANIFESTS, print)


def test_a_missing_operator_is_refused_and_leaves_nothing_behind(api: ClusterClient, cluster: FakeCluster) -> None:
    cluster.kinds["kubeflow.org/v1"].clear()
    with refused("Kubeflow Training Operator", field="PyTorchJob", kind=KindNotServed):
        submit_job(api, MANIFESTS, print)
    assert cluster.all("networkpolicies") == []


def test_a_dry_run_creates_nothing(api: ClusterClient, cluster: FakeCluster) -> None:
    dry_run_job(api, MANIFESTS)
    dry_run_job(api, JobManifests(job("TrainJob"), (RUNTIME,)))
    assert [seen.query.get("dryRun") for seen in cluster.seen if seen.method == "POST"] == ["All"] * 3
    cluster.admission.append(lambda *_: Answer(403, "Forbidden", "exceeded quota: few"))
    with refused("exceeded quota", field="NetworkPolicy r1", kind=ApiError):
        dry_run_job(api, MANIFESTS)
