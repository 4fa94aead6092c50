"""Training of two pods by the real training operator, also with a lost pod.

Every disturbed run has the same bits as the undisturbed one.
"""

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.training import Result, Training

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def shards(cluster: Cluster, namespace: str, image: str) -> None:
    """Shard set of all runs in this module, built by a Job of the cluster."""
    sharding = Training(cluster, namespace, image, "calm", "job", stage="shard")
    sharding.succeed()


@pytest.fixture(scope="module")
def calm(cluster: Cluster, namespace: str, image: str, shards: None) -> Result:
    """Result of an undisturbed run."""
    training = Training(cluster, namespace, image, "calm", "pytorchjob")
    training.succeed()
    assert [pod.status.phase for pod in training.pods()] == ["Succeeded", "Succeeded"]
    return training.result()


@pytest.mark.cluster_ci
def test_two_pods_train_from_shards_on_a_volume_and_learn(calm: Result) -> None:
    assert len(calm.losses) == 135
    assert calm.losses[0] > 2
    assert sum(calm.losses[-22:]) / 22 < calm.losses[0] / 2
    assert calm.events.count("start") == 1


def test_the_model_is_evaluated_by_a_job(cluster: Cluster, namespace: str, image: str, calm: Result) -> None:
    Training(cluster, namespace, image, "calm", "job", stage="evaluate").succeed()
    written = cluster.run(namespace, image, "cat", "/workspace/runs/calm/evaluation.json")
    assert '"top1"' in written


@pytest.mark.cluster_ci
def test_a_killed_rank_is_restarted_and_the_run_ends_with_the_same_bits(
    cluster: Cluster, namespace: str, image: str, calm: Result
) -> None:
    training = Training(cluster, namespace, image, "killed", "pytorchjob")
    training.wait_for_step(45)
    training.kill_ranks(1)
    training.succeed()
    assert sum(training.restarts()) > 0
    assert training.result().same_bits(calm)
    training.delete()


def test_a_deleted_first_pod_comes_back_and_the_run_ends_with_the_same_bits(
    cluster: Cluster, namespace: str, image: str, calm: Result
) -> None:
    training = Training(cluster, namespace, image, "deleted", "pytorchjob")
    training.wait_for_step(45)
    first = training.pods()[0].metadata
    cluster.kill(namespace, first.name)
    training.succeed()
    assert training.pods()[0].metadata.uid != first.uid
    assert training.result().same_bits(calm)
    training.delete()


def test_a_drained_node_ends_no_run(cluster: Cluster, namespace: str, image: str, calm: Result) -> None:
    training = Training(cluster, namespace, image, "drained", "pytorchjob")
    training.wait_for_step(45)
    pods = training.pods()
    for pod in pods:
        cluster.evict(namespace, pod.metadata.name)
    training.succeed()
    assert {pod.metadata.uid for pod in training.pods()}.isdisjoint(pod.metadata.uid for pod in pods)
    result = training.result()
    assert result.same_bits(calm)
    assert "resumed" in result.events
    training.delete()
