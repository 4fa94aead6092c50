"""Runs whose nodes fail, on kwok's fake nodes: after each failure one job, one set of pods, and every step once.

The full form is `python -m benchmarks.failures --kubeconfig FILE`; this one has fewer pods and hours.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.failures.fleet import Fleet, FleetSpec
from benchmarks.failures.model import LLAMA_3, TOLERANCE, FakeRun
from tests.cluster.cluster import Cluster

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.cluster_full("jobset.x-k8s.io"),
    pytest.mark.usefixtures("fake_kubelets"),
]
RUN = FakeRun(2048, LLAMA_3)


@pytest.mark.parametrize("backend", ["pytorchjob", "jobset"])
def test_every_run_ends_after_failures_of_its_nodes(cluster: Cluster, tmp_path: Path, backend: str) -> None:
    """The operator gives each job up after two restarts, so that the launcher has to submit it again."""
    run = replace(RUN, checkpoint_steps=RUN.best_checkpoint_steps())
    with cluster.namespace("failures") as namespace:
        result = Fleet(cluster.api, namespace, FleetSpec(backend, run, 2, 4, 24.0, restarts=2), tmp_path).run()
    print(result)
    assert result.violations == []
    assert result.succeeded == 2
    assert result.fleet.failures >= 8
    assert result.launcher_kills >= 2
    assert abs(result.fleet.difference) < TOLERANCE
    assert result.jobs > 2 if backend == "pytorchjob" else result.jobs == 2  # a JobSet does not count lost nodes
