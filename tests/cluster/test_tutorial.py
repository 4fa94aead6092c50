"""The commands of docs/tutorials/first-cluster-run.md, in order, on the cluster under test."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.support import helm
from tests.support.tutorials import ROOT, assert_tutorial_runs

PAGE = ROOT / "docs" / "tutorials" / "first-cluster-run.md"
NAMESPACE = "podscale"
IMAGES = ("localhost/podscale-base:dev", "localhost/podscale-tools:dev")
TIMEOUT_SECONDS = 1800


def exists(cluster: Cluster) -> bool:
    return NAMESPACE in {item.metadata.name for item in cluster.core.list_namespace().items}


@pytest.fixture
def free_namespace(cluster: Cluster) -> Iterator[None]:
    """The page's namespace, which must not exist; it is deleted afterwards, whatever happened."""
    if exists(cluster):
        pytest.skip(f"the cluster has a namespace {NAMESPACE}, which the tutorial would use")
    yield
    if exists(cluster):
        release = [helm.program(), "uninstall", "podscale", "--namespace", NAMESPACE, "--ignore-not-found"]
        subprocess.run(release, capture_output=True, check=False)
        cluster.core.delete_namespace(NAMESPACE)


@pytest.mark.timeout(TIMEOUT_SECONDS + 120)
def test_the_commands_of_the_tutorial_run_and_print_what_it_shows(
    cluster: Cluster, free_namespace: None, tmp_path: Path
) -> None:
    absent = [name for name in IMAGES if not cluster.has_image(name)]
    if absent:
        pytest.skip(f"images missing on the cluster: {', '.join(absent)}. `make cluster-images` builds and loads them.")
    folder = tmp_path / "reader"
    folder.mkdir()
    (folder / "charts").symlink_to(ROOT / "charts")

    ended = assert_tutorial_runs(PAGE, folder, TIMEOUT_SECONDS)

    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    hashes = [line.split()[0] for lines in ended.printed.values() for line in lines if "/model.safetensors" in line]
    assert len(hashes) == 2
    assert len(set(hashes)) == 1, hashes
