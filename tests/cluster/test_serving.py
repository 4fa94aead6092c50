"""The server of a run's model on a real cluster: predictions, a rolling restart under load, and KServe's kind."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.cli.documents import render_server
from podscale.cli.options import ServerOptions
from podscale.config import RunConfig, dumps
from tests.cluster.cluster import Cluster
from tests.cluster.test_job_manifests import create
from tests.cluster.training import document
from tests.support import crds

pytestmark = [pytest.mark.cluster_ci, pytest.mark.timeout(900)]

RUN = "served"
NAME = f"{RUN}-serve"
SETTINGS = ("launch.nodes=1", "launch.resources.cpus=0.5", "input.image_size=64", "model.width=16")
LOAD = (Path(__file__).resolve().parents[2] / "benchmarks" / "http_load.py").read_text(encoding="utf-8")
SECONDS = 20

# Writes the run's directory with a model of random weights, and a picture for each of four seeds.
MODEL = """
import sys
from pathlib import Path
import numpy as np, torch
from PIL import Image
from podscale.config import dumps, loads
from podscale.pytorch.models import build_model
from podscale.pytorch.models.state import model_arrays
from podscale.pytorch.train_state import as_array
from podscale.training.model_weights import TrainedModel, export_model
from podscale.training.run_progress import RunProgress
config, classes = loads(sys.argv[1]), ["ant", "bee", "cat", "dog", "eel", "fox"]
torch.manual_seed(3)
arrays = {name: as_array(tensor) for name, tensor in model_arrays(build_model(config.model, len(classes))).items()}
arrays["fc.weight"] = arrays["fc.weight"] * 20
run = Path("/workspace/runs") / config.run.id
export_model(arrays, TrainedModel(config, classes, RunProgress(step=1)), run / "model")
(run / "config.yaml").write_text(dumps(config))
images = Path("/workspace/images")
images.mkdir(exist_ok=True)
for seed in range(4):
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((320, 240), Image.Resampling.BICUBIC).save(images / f"{seed}.jpg")
"""

# Posts the pictures as one form; prints the rows of the answer.
CLASSIFY = """
import json, sys, urllib.request
from pathlib import Path
parts = (
    f'--x\\r\\nContent-Disposition: form-data; name="image"; filename="{path}"\\r\\n\\r\\n'.encode() + path.read_bytes()
    for path in sorted(Path("/workspace/images").iterdir())
)
body = b"".join(part + b"\\r\\n" for part in parts) + b"--x--\\r\\n"
headers = {"Content-Type": "multipart/form-data; boundary=x"}
with urllib.request.urlopen(urllib.request.Request(sys.argv[1], body, headers), timeout=60) as answer:
    print(json.dumps(json.load(answer)["predictions"]))
"""


@pytest.fixture(scope="module")
def config(cluster: Cluster, namespace: str, image: str) -> RunConfig:
    """Document of a run whose model and pictures are in the claim."""
    config = document(image, RUN, *SETTINGS)
    cluster.run(namespace, image, "python3", "-c", MODEL, dumps(config))
    return config


@pytest.fixture(scope="module")
def server(cluster: Cluster, namespace: str, config: RunConfig) -> Iterator[str]:
    """Address of the server inside the cluster, once its pod is ready."""
    objects = render_server(config, "deployment", ServerOptions())
    for manifest in objects:
        cluster.create(namespace, manifest)
    try:
        cluster.wait("the server's pod", lambda: ready_pods(cluster, namespace) == 1)
        yield f"http://{NAME}.{namespace}/predict"
    finally:
        for manifest in objects:
            cluster.delete(namespace, manifest["apiVersion"], manifest["kind"], NAME)


def ready_pods(cluster: Cluster, namespace: str) -> int:
    status = cluster.get(namespace, "apps/v1", "Deployment", NAME).get("status") or {}
    return int(status.get("readyReplicas") or 0)


def load_command(url: str, *options: str) -> list[str]:
    images = [f"/workspace/images/{seed}.jpg" for seed in range(4)]
    return ["python3", "-c", LOAD, url, *images, "--seconds", str(SECONDS), "--new-connections", *options]


def test_the_service_gives_the_rows_of_predict(cluster: Cluster, namespace: str, image: str, server: str) -> None:
    printed = cluster.run(
        namespace, image, "podscale", "predict", f"/workspace/runs/{RUN}", "/workspace/images", "--batch", "1"
    )
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    served = json.loads(cluster.run(namespace, image, "python3", "-c", CLASSIFY, server).splitlines()[-1])
    assert len(rows) == len(served) == 4
    for row, other in zip(rows, served, strict=True):
        assert row["classes"] == other["classes"]
        assert row["probabilities"] == pytest.approx(other["probabilities"], abs=2e-6)


def test_bad_input_and_silent_clients_do_not_stop_it(
    cluster: Cluster, namespace: str, image: str, server: str, record_property: Any
) -> None:
    calm = json.loads(cluster.run(namespace, image, *load_command(server, "--clients", "4")).splitlines()[-1])
    disturbed = json.loads(
        cluster.run(
            namespace, image, *load_command(server, "--clients", "4", "--bad", "4", "--silent", "64")
        ).splitlines()[-1]
    )
    for name, result in (("calm", calm), ("disturbed", disturbed)):
        record_property(name, json.dumps(result))
        print(name, result)
    assert set(calm["codes"]) == {"200"}
    assert set(disturbed["codes"]) == {"200", "bad 400"}
    assert disturbed["images"] > calm["images"] / 4
    (pod,) = cluster.pods(namespace, f"podscale.dev/run={RUN},podscale.dev/stage=serve")
    assert [status.restart_count for status in pod.status.container_statuses] == [0]


def test_a_rolling_restart_loses_no_request(cluster: Cluster, namespace: str, image: str, server: str) -> None:
    """The new pod is ready before the old one drops its readiness and drains."""
    (before,) = cluster.pods(namespace, f"podscale.dev/run={RUN},podscale.dev/stage=serve")
    with cluster.loaded(namespace, image, load_command(server, "--clients", "2", "--seconds", "90")) as result:
        restart = ["kubectl", "rollout", "restart", f"deployment/{NAME}", "--namespace", namespace]
        subprocess.run(restart, check=True, capture_output=True)
        status = ["kubectl", "rollout", "status", f"deployment/{NAME}", "--namespace", namespace, "--timeout=80s"]
        done = subprocess.run(status, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    answered = json.loads(result().splitlines()[-1])
    assert set(answered["codes"]) == {"200"}, answered
    after = cluster.pods(namespace, f"podscale.dev/run={RUN},podscale.dev/stage=serve")
    assert before.metadata.name not in {pod.metadata.name for pod in after if pod.metadata.deletion_timestamp is None}


@pytest.fixture
def kserve(cluster: Cluster) -> Iterator[None]:
    """KServe's CustomResourceDefinition of InferenceService, unless the cluster has it."""
    group = "serving.kserve.io"
    if group in cluster.groups:
        yield
        return
    definition = yaml.safe_dump(crds.definition("InferenceService"))
    apply = ["kubectl", "apply", "--server-side", "-f", "-"]
    done = subprocess.run(apply, input=definition, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    name = f"crd/inferenceservices.{group}"
    established = ["kubectl", "wait", "--for=condition=Established", name, "--timeout=0"]
    try:
        # kubectl fails at once, whatever its time limit, on a definition that has no conditions yet.
        cluster.wait("the definition", lambda: subprocess.run(established, capture_output=True).returncode == 0)
        yield
    finally:
        subprocess.run(["kubectl", "delete", name], check=True, capture_output=True)


def test_the_api_server_accepts_kserves_kind(kserve: None, namespace: str, config: RunConfig) -> None:
    options = ServerOptions(
        model="/workspace/models", replicas=1, max_replicas=3, serving_runtime="kserve-tritonserver"
    )
    (service,) = render_server(config, "kserve", options)
    create(namespace, [service], "--dry-run=server")
    service["spec"]["predictor"]["model"]["storage_uri"] = "gs://bucket"
    with pytest.raises(AssertionError, match="storage_uri"):
        create(namespace, [service], "--dry-run=server")
