"""Installation of the operators from the manifests and charts of their modules, with locally built images."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.lab import fake_kubelet, images, places, programs
from tests.cluster.lab.commands import attempt, kubectl, run, wait_for

MANAGER = "controllerManagerConfigYaml"
QUEUED = (
    "batch/job",
    "kubeflow.org/pytorchjob",
    "kubeflow.org/jaxjob",
    "jobset.x-k8s.io/jobset",
    "trainer.kubeflow.org/trainjob",
)
AUTOSCALER = "k8s.io/autoscaler/cluster-autoscaler/apis"
PROVISIONING = "config/crd/autoscaling.x-k8s.io_provisioningrequests.yaml"
SMALL = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"cpu": "2", "memory": "2Gi"}}
"""Resources of an operator's container: the charts request half a core each, which a test machine does not have."""

SMALLEST_JOB = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "metadata": {"name": "smallest", "namespace": "default"},
    "spec": {
        "pytorchReplicaSpecs": {
            "Worker": {"replicas": 1, "template": {"spec": {"containers": [{"name": "pytorch", "image": "none"}]}}}
        }
    },
}


def install(entries: Iterable[programs.Source], say: Callable[[str], None]) -> None:
    """Install those of the operators that are missing, and wait until all are available."""
    for entry in entries:
        if entry.name in ADDONS and not _installed(entry):
            say(f"installing {entry.name}")
            ADDONS[entry.name]()
            _mark(entry).parent.mkdir(parents=True, exist_ok=True)
            _mark(entry).write_text(entry.pin())
        if entry.name == "kwok":
            fake_kubelet.start()


def training_operator() -> None:
    """Install the training operator (PyTorchJob, JAXJob) and wait until its webhooks answer."""
    folder = _copy("training-operator", "manifests")
    image, _, tag = images.of_program("training-operator").rpartition(":")
    container = "/spec/template/spec/containers/0"
    changes: list[dict[str, Any]] = [{"op": "add", "path": f"{container}/resources", "value": SMALL}]
    for probe in ("readinessProbe", "livenessProbe"):  # a slow probe on a busy machine does not mean a broken operator
        changes.append({"op": "replace", "path": f"{container}/{probe}/timeoutSeconds", "value": 20})
    overlay = {
        "resources": ["manifests/overlays/standalone"],
        "images": [{"name": "ghcr.io/kubeflow/training-v1/training-operator", "newName": image, "newTag": tag}],
        "patches": [{"target": {"kind": "Deployment"}, "patch": yaml.safe_dump(changes)}],
    }
    (folder.parent / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    kubectl("apply", "--server-side", "-k", folder.parent)
    available("kubeflow", "training-operator")
    wait_for("the training operator's webhooks", 120, lambda: _accepted(SMALLEST_JOB))


def jobset() -> None:
    """Install JobSet, without leader election: on a busy machine its controller would lose it and restart."""
    chart = _copy("jobset", "charts/jobset")
    image, _, tag = images.of_program("jobset").rpartition(":")
    values = {
        "image": {"repository": image, "tag": tag, "pullPolicy": "IfNotPresent"},
        "controller": {"resources": SMALL, "leaderElection": {"enable": False}},
    }
    _helm("jobset", "jobset-system", chart, values)


def trainer() -> None:
    """Install Kubeflow Trainer without JobSet, which is installed already, and without its default runtimes."""
    chart = _copy("trainer", "charts/kubeflow-trainer")
    definition = yaml.safe_load((chart / "Chart.yaml").read_text())
    del definition["dependencies"]  # dependencies from a registry, both disabled below
    _rewrite(chart / "Chart.yaml", yaml.safe_dump(definition))
    image, _, tag = images.of_program("trainer-controller-manager").rpartition(":")
    registry, _, repository = image.partition("/")
    values = {
        "image": {"registry": registry, "repository": repository, "tag": tag},
        "jobset": {"install": False},
        "dataCache": {"enabled": False, "lws": {"install": False}},
        "runtimes": {"defaultEnabled": False},
        "manager": {"resources": SMALL},
    }
    _helm("trainer", "kubeflow-system", chart, values)


def kueue() -> None:
    """Install Kueue for Podscale's kinds of jobs; its chart omits those of the training operator.

    Kueue checks at its start whether the cluster serves ProvisioningRequests, so their definition is installed first.
    """
    kubectl("apply", "--server-side", "-f", str(programs.required_module("kueue", AUTOSCALER) / PROVISIONING))
    chart = _copy("kueue", "charts/kueue")
    image, _, tag = images.of_program("kueue").rpartition(":")
    configuration = yaml.safe_load(yaml.safe_load((chart / "values.yaml").read_text())["managerConfig"][MANAGER])
    configuration["integrations"]["frameworks"] = list(QUEUED)
    configuration["leaderElection"]["leaderElect"] = False
    manager = {"image": {"repository": image, "tag": tag, "pullPolicy": "IfNotPresent"}, "resources": SMALL}
    values = {"controllerManager": {"manager": manager}, "managerConfig": {MANAGER: yaml.safe_dump(configuration)}}
    _helm("kueue", "kueue-system", chart, values)
    # They do not answer discovery here, and an unavailable API blocks the deletion of every namespace.
    services = kubectl("get", "apiservices", "-o", "name").split()
    for service in (name for name in services if "visibility.kueue" in name):
        kubectl("delete", service)


def prometheus_operator() -> None:
    """Install only the operator, in namespace monitoring; tests create Prometheus resources themselves."""
    bundle = programs.module_files("prometheus-operator") / "bundle.yaml"
    text = bundle.read_text().replace("namespace: default", "namespace: monitoring")
    for program in ("prometheus-operator", "prometheus-config-reloader"):
        version = programs.source_of(program).version
        text = text.replace(f"quay.io/prometheus-operator/{program}:{version}", images.of_program(program))
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "monitoring"}}
    kubectl("apply", "--server-side", "-f", "-", stdin=f"{yaml.safe_dump(namespace)}---\n{text}")
    available("monitoring", "prometheus-operator")


def available(namespace: str, deployment: str) -> None:
    kubectl("-n", namespace, "wait", "--for=condition=Available", f"deployment/{deployment}", "--timeout=180s")


ADDONS: dict[str, Callable[[], None]] = {
    "training-operator": training_operator,
    "jobset": jobset,
    "trainer": trainer,
    "kueue": kueue,
    "prometheus-operator": prometheus_operator,
}


def _mark(entry: programs.Source) -> Path:
    return places.STATE / "installed" / entry.name


def _installed(entry: programs.Source) -> bool:
    return _mark(entry).exists() and _mark(entry).read_text() == entry.pin()


def _copy(name: str, part: str) -> Path:
    """Copy a part of a module's files to a folder in which our changes can be added."""
    target = places.STATE / "addons" / name / part
    shutil.rmtree(target.parent, ignore_errors=True)
    shutil.copytree(programs.module_directory(programs.source(name)) / part, target)
    return target


def _accepted(manifest: dict[str, Any]) -> bool:
    """Return True if the API server and all webhooks accept this object."""
    command = ["kubectl", "create", "--dry-run=server", "-f", "-"]
    return attempt(*command, stdin=yaml.safe_dump(manifest)).returncode == 0


def _rewrite(path: Path, text: str) -> None:
    path.unlink()  # files of the module cache are read-only, and so are their copies
    path.write_text(text)


def _helm(release: str, namespace: str, chart: Path, values: dict[str, Any]) -> None:
    command = ["helm", "upgrade", "--install", release, chart, "--namespace", namespace, "--create-namespace"]
    run(*command, "--wait", "--timeout", "4m", "--values", "-", stdin=yaml.safe_dump(values))
