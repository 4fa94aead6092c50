"""Predictions on a real cluster: an indexed Job whose pods are killed, with exactly one row for each image."""

import json

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.launcher import Launcher
from tests.cluster.training import Training

pytestmark = pytest.mark.timeout(1800)
SHORT = "train.epochs=2"

# Prints the shard set of the run; or the images of all joined rows, and the names of the parts.
FIND_SET = "import pathlib; print(next(pathlib.Path('/workspace/datasets').glob('*/manifest.json')).parent)"
READ_ROWS = """
import json, pathlib
folder = pathlib.Path("/workspace/runs/calm/predicted")
(rows,) = folder.glob("*.jsonl")
parts = [path.name for path in rows.with_suffix("").iterdir() if not path.name.startswith(".")]
print(json.dumps([[json.loads(line)["image"] for line in rows.open()], sorted(parts)]))
"""


@pytest.fixture(scope="module")
def shard_set(cluster: Cluster, namespace: str, image: str) -> str:
    """Shard set of a run that has trained."""
    for stage, backend in (("shard", "job"), ("train", "pytorchjob")):
        Training(cluster, namespace, image, "calm", backend, SHORT, stage=stage).succeed()
    return cluster.run(namespace, image, "python3", "-c", FIND_SET).strip()


def test_killed_pods_are_replaced_and_every_image_has_one_row(
    cluster: Cluster, namespace: str, image: str, shard_set: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    launcher = Launcher(tmp_path_factory.mktemp("predict"), namespace, image, "calm", SHORT)
    options = ("--stage=predict", f"--images={shard_set}", "--parts=4", "--parallel=2", "--batch=16")
    submitted = launcher.start("submit", *options)
    pods = cluster.wait("two pods", lambda: cluster.pods(namespace, "podscale.dev/stage=predict"))
    cluster.kill(namespace, pods[0].metadata.name)
    assert submitted.end() == 0, submitted.text
    assert "/workspace/runs/calm/predicted/" in submitted.text
    images, parts = json.loads(cluster.run(namespace, image, "python3", "-c", READ_ROWS))
    assert len(images) == len(set(images)) == 1797
    assert parts == [f"part-{index:05d}-of-00004{suffix}" for index in range(4) for suffix in (".json", ".jsonl")]

    before = indexed_jobs(cluster, namespace)
    again = launcher.command("submit", *options)
    assert again.returncode == 0, again.stderr
    assert indexed_jobs(cluster, namespace) == before, "a job that has succeeded is not made again"


def indexed_jobs(cluster: Cluster, namespace: str) -> list[str]:
    found = cluster.all_of(namespace, "batch/v1", "Job")
    return [job["metadata"]["uid"] for job in found if job["spec"].get("completionMode") == "Indexed"]
