"""The same training with the other kinds of jobs and their real operators: JAXJob, JobSet and TrainJob."""

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.training import Result, Training

pytestmark = pytest.mark.timeout(1800)
SHORT = "train.epochs=12"  # still runs when a pod is lost, also on a fast machine

JAXJOB = pytest.param("jaxjob", marks=pytest.mark.cluster_full("kubeflow.org"))
JOBSET = pytest.param("jobset", marks=pytest.mark.cluster_full("jobset.x-k8s.io"))
TRAINJOB = pytest.param("trainjob", marks=pytest.mark.cluster_full("trainer.kubeflow.org"))


@pytest.fixture(scope="module")
def reference(cluster: Cluster, namespace: str, image: str) -> Result:
    """Result of a PyTorchJob with the same document, and the shared shard set."""
    Training(cluster, namespace, image, "reference", "job", SHORT, stage="shard").succeed()
    training = Training(cluster, namespace, image, "reference", "pytorchjob", SHORT)
    training.succeed()
    return training.result()


@pytest.mark.parametrize("backend", [JAXJOB, JOBSET, TRAINJOB])
def test_the_same_training_ends_with_the_same_bits(
    backend: str, cluster: Cluster, namespace: str, image: str, reference: Result
) -> None:
    training = Training(cluster, namespace, image, f"by-{backend}", backend, SHORT)
    assert len(cluster.wait("two pods", lambda: training.pods() if len(training.pods()) == 2 else [])) == 2
    training.succeed()
    assert training.result().same_bits(reference)


@pytest.mark.parametrize("backend", [JOBSET, TRAINJOB])
def test_a_lost_pod_restarts_the_set_and_the_run_ends_with_the_same_bits(
    backend: str, cluster: Cluster, namespace: str, image: str, reference: Result
) -> None:
    training = Training(cluster, namespace, image, f"lost-{backend}", backend, SHORT)
    training.wait_for_step(23)
    cluster.kill(namespace, training.pods()[0].metadata.name)
    training.succeed()
    result = training.result()
    assert result.same_bits(reference)
    assert "resumed" in result.events


@pytest.mark.cluster_full("jobset.x-k8s.io")
def test_bad_input_ends_a_set_at_once(cluster: Cluster, namespace: str, image: str, reference: Result) -> None:
    training = Training(cluster, namespace, image, "bad", "jobset", SHORT, "input.loader=dali")
    cluster.wait("its end", training.ended)
    assert training.ended() == "failed"
    assert training.conditions()["Failed"]["reason"] == "FailJobSetFailurePolicyAction"
