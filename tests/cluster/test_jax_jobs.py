"""JAX engine on a cluster, as JAXJob and JobSet of two pods with one CPU device each, also with a lost pod or process.

Every disturbed run has the same bits as the undisturbed one.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from podscale.runs.stage_outcomes import StageName
from tests.cluster.cluster import Cluster
from tests.cluster.training import Result, Training

pytestmark = [pytest.mark.timeout(1800), pytest.mark.cluster_full("kubeflow.org")]
CHANGES = ("train.engine=jax", "train.epochs=12")  # still runs when a pod is lost, also on a fast machine
LOST_AT = 45

Start = Callable[..., Training]


def of_jobset(pod: int) -> Any:
    return pytest.param("jobset", pod, marks=pytest.mark.cluster_full("jobset.x-k8s.io"))


@pytest.fixture(scope="module")
def start(cluster: Cluster, namespace: str, jax_image: str) -> Start:
    """start(run, backend, stage="train") starts a job of that kind with the JAX engine."""

    def begin(run: str, backend: str, stage: StageName = "train") -> Training:
        return Training(cluster, namespace, jax_image, run, backend, *CHANGES, stage=stage)

    return begin


@pytest.fixture(scope="module")
def calm(start: Start) -> Result:
    """Result of an undisturbed JAXJob, on a shard set from a Job."""
    start("calm", "job", "shard").succeed()
    training = start("calm", "jaxjob")
    training.succeed()
    assert [pod.status.phase for pod in training.pods()] == ["Succeeded", "Succeeded"]
    return training.result()


def test_a_jaxjob_trains_from_shards_on_a_volume_and_learns(calm: Result) -> None:
    assert len(calm.losses) == 270
    assert calm.losses[0] > 2
    assert sum(calm.losses[-22:]) / 22 < calm.losses[0] / 2
    assert calm.events.count("start") == 1


def test_the_model_is_evaluated_by_a_job(
    cluster: Cluster, namespace: str, jax_image: str, start: Start, calm: Result
) -> None:
    start("calm", "job", "evaluate").succeed()
    written = cluster.run(namespace, jax_image, "cat", "/workspace/runs/calm/evaluation.json")
    assert json.loads(written)["figures"]["top1"] > 0.8


@pytest.mark.cluster_full("jobset.x-k8s.io")
def test_a_jobset_ends_with_the_same_bits(start: Start, calm: Result) -> None:
    training = start("by-jobset", "jobset")
    training.succeed()
    assert training.result().same_bits(calm)


@pytest.mark.parametrize(("backend", "pod"), [("jaxjob", 0), ("jaxjob", 1), of_jobset(0)])
def test_a_lost_pod_comes_back_and_the_run_ends_with_the_same_bits(
    backend: str, pod: int, cluster: Cluster, namespace: str, start: Start, calm: Result
) -> None:
    """Both the first pod, which has the rendezvous and JAX's coordination service, and the other one."""
    training = start(f"lost-{pod}-{backend}", backend)
    training.wait_for_step(LOST_AT)
    lost = training.pods()[pod].metadata
    cluster.kill(namespace, lost.name)
    training.succeed()
    assert lost.uid not in [new.metadata.uid for new in training.pods()]
    result = training.result()
    assert result.same_bits(calm)
    assert "resumed" in result.events


@pytest.mark.parametrize(("backend", "pod"), [("jaxjob", 0), of_jobset(1)])
def test_a_killed_rank_is_started_again_and_the_run_ends_with_the_same_bits(
    backend: str, pod: int, start: Start, calm: Result
) -> None:
    """A JAXJob restarts the containers; a JobSet recreates all pods."""
    training = start(f"killed-{pod}-{backend}", backend)
    training.wait_for_step(LOST_AT)
    before = [each.metadata.uid for each in training.pods()]
    training.kill_ranks(pod)
    training.succeed()
    anew = [each.metadata.uid for each in training.pods()] != before
    assert anew if backend == "jobset" else sum(training.restarts()) > 0
    result = training.result()
    assert result.same_bits(calm)
    assert "resumed" in result.events
