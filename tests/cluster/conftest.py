"""What the tests against a real cluster share: the cluster, a namespace of their own, the image under test."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, connect, kubeconfig
from tests.cluster.lab import places

HERE = Path(__file__).parent
HOW = "make cluster-up brings one up on this machine, KUBECONFIG=... make cluster-test takes another"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("cluster")


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """That cluster, its kubectl and its helm, for what the tests of this folder start; for no other test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(kubeconfig() or places.KUBECONFIG))
        patch.setenv("PATH", f"{places.bin_dir()}:{os.environ['PATH']}")
        yield


@cache
def _look() -> Cluster | str:
    """The cluster under test, or why there is none; looked for once."""
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
    """The cluster under test; skips where there is none."""
    return _connected()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test marked cluster_full(group, ...) on a cluster without one of these API groups, before any fixture."""
    for mark in item.iter_markers("cluster_full"):
        missing = [group for group in mark.args if group not in _connected().groups]
        if missing:
            pytest.skip(f"this cluster lacks {', '.join(missing)}: make cluster-up FULL=1")


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh namespace that enforces Pod Security "restricted", with a claim `workspace`; gone after the module."""
    with cluster.namespace(request.module.__name__.rpartition(".")[2]) as name:
        yield name


@pytest.fixture(scope="session")
def image(cluster: Cluster) -> str:
    """The CPU image under test; PODSCALE_TEST_IMAGE names another."""
    return _held(cluster, os.environ.get("PODSCALE_TEST_IMAGE", "localhost/podscale-base:dev"))


@pytest.fixture(scope="session")
def launcher_image(cluster: Cluster, image: str) -> str:
    """The launchers' image, podscale-tools beside the other; PODSCALE_TEST_LAUNCHER_IMAGE names another."""
    default = image.replace("podscale-base", "podscale-tools")
    return _held(cluster, os.environ.get("PODSCALE_TEST_LAUNCHER_IMAGE", default))


@pytest.fixture(scope="session")
def jax_image(cluster: Cluster, image: str) -> str:
    """The image that has JAX, podscale-tpu beside the other; without TPUs it computes on CPUs."""
    return _held(cluster, image.replace("podscale-base", "podscale-tpu"))


def _held(cluster: Cluster, name: str) -> str:
    """The name of an image that the cluster holds; skips where it does not."""
    if not cluster.has_image(name):
        pytest.skip(f"the cluster lacks the image {name}: make cluster-images builds it and brings it in")
    return name
