"""Cluster double, and the real client connected to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from podscale.kubernetes.client import ClusterClient, connect_cluster
from podscale.kubernetes.retry import RetryPolicy
from podscale.kubernetes.transport import NamedCluster
from tests.support.fake_cluster import FakeCluster


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    with FakeCluster().running() as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig(tmp_path / "kubeconfig")))
        yield running


@pytest.fixture
def notices() -> list[str]:
    """Notices of the client for the user."""
    return []


@pytest.fixture
def api(cluster: FakeCluster, notices: list[str]) -> ClusterClient:
    return connect_cluster(NamedCluster(), policy=RetryPolicy(10.0, first_pause=0.05), notify=notices.append)
