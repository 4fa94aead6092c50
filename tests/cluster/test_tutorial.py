"""Commands of the documentation on the cluster under test: those of the tutorial, of README and of manifests/README.

The commands of the READMEs run as they are printed, except that REGISTRY is the registry of the images here.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.support import helm
from tests.support.readme_commands import MANIFESTS_COMMANDS, README_COMMANDS, Commands
from tests.support.tutorials import ROOT, Block, assert_tutorial_runs, run_blocks

PAGE = ROOT / "docs" / "tutorials" / "first-cluster-run.md"
NAMESPACE = "podscale"
REGISTRY = "localhost"
IMAGES = (f"{REGISTRY}/podscale-base:dev", f"{REGISTRY}/podscale-tools:dev")
TIMEOUT_SECONDS = 1800


def exists(cluster: Cluster) -> bool:
    return NAMESPACE in {item.metadata.name for item in cluster.core.list_namespace().items}


@pytest.fixture
def free_namespace(cluster: Cluster) -> Iterator[None]:
    """The pages' namespace, which must not exist; it is deleted afterwards, whatever happened."""
    if exists(cluster):
        pytest.skip(f"the cluster has a namespace {NAMESPACE}, which the commands would use")
    absent = [name for name in IMAGES if not cluster.has_image(name)]
    if absent:
        pytest.skip(f"images missing on the cluster: {', '.join(absent)}. `make cluster-images` builds and loads them.")
    yield
    if exists(cluster):
        release = [helm.program(), "uninstall", "podscale", "--namespace", NAMESPACE, "--ignore-not-found"]
        subprocess.run(release, capture_output=True, check=False)
        cluster.core.delete_namespace(NAMESPACE)
    cluster.wait(f"the end of namespace {NAMESPACE}", lambda: not exists(cluster))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder like a checkout, whose files the commands may change."""
    checkout = tmp_path / "reader"
    checkout.mkdir()
    for name in ("charts", "manifests"):
        shutil.copytree(ROOT / name, checkout / name)
    return checkout


@pytest.mark.timeout(TIMEOUT_SECONDS + 120)
def test_the_commands_of_the_tutorial_run_and_print_what_it_shows(
    cluster: Cluster, free_namespace: None, folder: Path
) -> None:
    ended = assert_tutorial_runs(PAGE, folder, TIMEOUT_SECONDS)

    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    hashes = [line.split()[0] for lines in ended.printed.values() for line in lines if "/model.safetensors" in line]
    assert len(hashes) == 2
    assert len(set(hashes)) == 1, hashes


@pytest.mark.timeout(TIMEOUT_SECONDS + 120)
@pytest.mark.parametrize("commands", [README_COMMANDS, MANIFESTS_COMMANDS], ids=lambda commands: commands.page)
def test_the_commands_of_a_readme_train_the_digits(
    cluster: Cluster, free_namespace: None, folder: Path, commands: Commands
) -> None:
    block = Block(1, commands.read().replace("REGISTRY", REGISTRY), None)
    ended = run_blocks([block], folder, TIMEOUT_SECONDS)
    assert ended.code == 0, ended.last
    done = subprocess.run(
        ["kubectl", "get", "pytorchjob,job", "--namespace", NAMESPACE, "-o", "name"], capture_output=True, text=True
    )
    stages = {f"job.batch/digits-{stage}" for stage in ("shard", "evaluate", "report")}
    assert {"pytorchjob.kubeflow.org/digits", *stages} <= set(done.stdout.split()), done.stdout + done.stderr
    if "podscale doctor" in block.commands:
        assert any(f"image {IMAGES[0]}" in line and line.startswith("ok") for line in ended.printed[1]), ended.last
