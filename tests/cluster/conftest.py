"""Fixtures of the tests on a real cluster: the cluster, a namespace, and the images under test."""

import functools
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, connect, kubeconfig
from tests.cluster.lab import places, processes
from tests.cluster.pipeline import Documents, pipeline_document, prepare_for_pipelines

HERE = Path(__file__).parent
HOW = "make cluster-up brings one up on this machine, KUBECONFIG=... make cluster-test takes another"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("cluster")


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Environment with the cluster, its kubectl and helm, for programs that the tests of this folder start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(kubeconfig() or places.KUBECONFIG))
        patch.setenv("PATH", f"{places.bin_dir()}:{os.environ['PATH']}")
        yield


@cache
def _look() -> Cluster | str:
    """Return the cluster under test, or the reason why there is none; evaluated once."""
    file = kubeconfig()
    if file is None:
        return f"needs a Kubernetes cluster: {HOW}"
    return connect(str(file)) or f"the cluster of {file} does not answer: {HOW}"


def _connected() -> Cluster:
    connection = _look()
    if isinstance(connection, str):
        pytest.skip(connection)
    return connection


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """Cluster under test; skips the test if there is none."""
    return _connected()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked cluster_full(group, ...) before any fixture, if the cluster lacks one of these API groups."""
    for mark in item.iter_markers("cluster_full"):
        missing = [group for group in mark.args if group not in _connected().groups]
        if missing:
            pytest.skip(f"this cluster lacks {', '.join(missing)}: make cluster-up FULL=1")


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """New namespace that enforces Pod Security "restricted", with a claim `workspace`; deleted after the module."""
    with cluster.namespace(request.module.__name__.rpartition(".")[2]) as name:
        yield name


@pytest.fixture
def fake_kubelets(cluster: Cluster) -> None:
    """Skip the test without simulated kubelets: nodes without a kubelet would disturb a cluster in use."""
    if not (cluster.is_lab and processes.alive("kwok")) and os.environ.get("PODSCALE_TEST_KWOK") != "1":
        pytest.skip("needs kwok: make cluster-up FULL=1 starts it; set PODSCALE_TEST_KWOK=1 if a cluster has it")


@pytest.fixture(scope="session")
def image(cluster: Cluster) -> str:
    """CPU image under test; PODSCALE_TEST_IMAGE overrides it."""
    return _held(cluster, os.environ.get("PODSCALE_TEST_IMAGE", "localhost/podscale-base:dev"))


@pytest.fixture(scope="session")
def launcher_image(cluster: Cluster, image: str) -> str:
    """Launcher image, podscale-tools of the same registry and tag; PODSCALE_TEST_LAUNCHER_IMAGE overrides it."""
    default = image.replace("podscale-base", "podscale-tools")
    return _held(cluster, os.environ.get("PODSCALE_TEST_LAUNCHER_IMAGE", default))


@pytest.fixture(scope="session")
def jax_image(cluster: Cluster, image: str) -> str:
    """Image with JAX, podscale-tpu of the same registry and tag; without TPUs it computes on CPUs."""
    return _held(cluster, image.replace("podscale-base", "podscale-tpu"))


def _held(cluster: Cluster, name: str) -> str:
    """Return the image's name; skip the test if the cluster does not have it."""
    if not cluster.has_image(name):
        pytest.skip(f"the cluster lacks the image {name}: make cluster-images builds and loads it")
    return name


@pytest.fixture
def document(image: str, launcher_image: str) -> Documents:
    """Return the digits document for the pipeline, with at most one retry per task."""
    return functools.partial(pipeline_document, image, launcher_image)


@pytest.fixture(scope="module")
def prepared_namespace(cluster: Cluster, namespace: str) -> str:
    """Return a namespace with the launcher's service account, its role, and a claim for artifacts."""
    prepare_for_pipelines(cluster, namespace)
    return namespace
