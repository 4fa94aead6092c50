"""The pod template of every kind of job: security, volumes, resources, placement."""

import json
from typing import Any

import pytest

from podscale.kubernetes.render import RENDERERS_BY_KIND, pod_placement
from podscale.kubernetes.render.common import to_yaml
from podscale.kubernetes.resources import parse_quantity
from podscale.runs.stage_outcomes import StageName
from tests.support.pod_security import violations
from tests.support.rendering import TWO, pods, rendered, spec

GPU = ("launch.hardware=nvidia-l4", "launch.processes=1")
DIRECT = ("launch.processes=8", "launch.nodes=2", "launch.cluster.network=gpudirect")
EVERYTHING = (
    "launch.cluster.volumes=[{path: /data, bucket: images, read_only: true}, {path: /more, claim: other},"
    " {path: /keys, secret: keys}, {path: /settings, config_map: settings}, {path: /scratch, empty_gib: 0.5}]",
    "launch.cluster.env={OMP_NUM_THREADS: 4, NCCL_DEBUG: INFO}",
    "launch.cluster.local_ssd=true",
    "launch.cluster.labels.team=vision",
    "launch.cluster.annotations.note=mine",
)


@pytest.mark.parametrize("backend", RENDERERS_BY_KIND)
@pytest.mark.parametrize("changes", [(), GPU, EVERYTHING], ids=["cpu", "gpu", "everything"])
def test_pods_are_admitted_where_security_is_restricted(backend: str, changes: tuple[str, ...]) -> None:
    pod = pods(backend, *changes)
    assert violations(pod.spec) == []
    assert pod.spec["automountServiceAccountToken"] is False
    assert pod.container["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_security_check_refuses_insecure_pods() -> None:
    """The security check used by these tests refuses each of these pods."""
    fine = pods("jobset").spec
    assert violations(fine) == []
    for changed, expected in [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}, "volume x"),
        ({"securityContext": {}}, "runAsNonRoot"),
        ({"initContainers": [{"name": "init-pytorch", "image": "alpine"}]}, "init-pytorch: capabilities"),
        ({"containers": [{**fine["containers"][0], "securityContext": {"privileged": True}}]}, "privileged"),
    ]:
        assert any(expected in one for one in violations({**fine, **changed})), expected


def test_pods_write_only_to_their_volumes() -> None:
    pod = pods("pytorchjob", "launch.resources.ephemeral_gib=3")
    mounts = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"] if not mount.get("readOnly")}
    assert mounts == {"/tmp": "tmp", "/dev/shm": "shm", "/workspace": "workspace"}
    volumes = {volume.pop("name"): volume for volume in json.loads(json.dumps(pod.spec["volumes"]))}
    assert "downwardAPI" in volumes.pop("pod-info"), "the pod's own annotations, read-only"
    assert volumes == {
        "tmp": {"emptyDir": {"sizeLimit": "3Gi"}},
        "shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
        "workspace": {"persistentVolumeClaim": {"claimName": "podscale"}},
    }
    assert pod.environment["HOME"] == "/tmp"


def test_volumes_of_the_document() -> None:
    pod = pods("pytorchjob", *EVERYTHING)
    mounts = {mount["mountPath"]: mount for mount in pod.container["volumeMounts"]}
    assert mounts["/data"]["readOnly"] is True
    assert mounts["/cache"]["name"] == "cache"
    by_name = {volume["name"]: volume for volume in pod.spec["volumes"]}
    assert set(by_name) == {mount["name"] for mount in mounts.values()}, (
        "every volume is mounted, and every mount is one"
    )
    assert by_name["volume-0"]["csi"]["driver"] == "gcsfuse.csi.storage.gke.io"
    assert by_name["volume-0"]["csi"]["volumeAttributes"]["mountOptions"] == "implicit-dirs,uid=65532,gid=65532"
    assert by_name["volume-4"]["emptyDir"] == {"sizeLimit": "512Mi"}
    assert pod.metadata["annotations"]["gke-gcsfuse/volumes"] == "true"
    assert pod.metadata["annotations"]["note"] == "mine"
    assert pod.metadata["labels"]["team"] == "vision"
    nfs = pods("pytorchjob", "launch.cluster.security=privileged", "launch.cluster.volumes=[{path: /n, nfs: 'h:/e/x'}]")
    assert nfs.spec["volumes"][-1]["nfs"] == {"server": "h", "path": "/e/x"}


def test_the_documents_variables_come_last_and_once() -> None:
    environment = pods("jobset", *GPU, *TWO, *EVERYTHING).environment
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize("stage", ["shard", "train", "evaluate", "report"])
@pytest.mark.parametrize("hardware", [(), ("launch.hardware=cpu",)], ids=["no hardware", "cpu"])
def test_pods_on_cpus_have_requests_and_limits(stage: StageName, hardware: tuple[str, ...]) -> None:
    """A namespace with a quota on requests or limits refuses pods without them."""
    resources = pods("pytorchjob" if stage == "train" else "job", *hardware, stage=stage).container["resources"]
    for kind in ("requests", "limits"):
        assert {"cpu", "memory", "ephemeral-storage"} <= set(resources[kind])
    for name, amount in resources["requests"].items():
        assert parse_quantity(amount) <= parse_quantity(resources["limits"][name])
    assert parse_quantity(resources["requests"]["cpu"]) <= 1, "two pods fit on a laptop of two cores"
    assert parse_quantity(resources["requests"]["memory"]) <= 2 * 2**30


def test_one_named_amount_leaves_the_other_to_the_default() -> None:
    resources = pods("pytorchjob", "launch.resources.cpus=3").container["resources"]
    assert resources["requests"]["cpu"] == resources["limits"]["cpu"] == "3"
    assert resources["requests"]["memory"] != resources["limits"]["memory"]


def test_requests_are_limits() -> None:
    asked = ("launch.resources.cpus=1.5", "launch.resources.memory_gib=6.5", "launch.resources.shm_gib=3")
    resources = pods("pytorchjob", *asked).container["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"] == {"cpu": "1.5", "memory": "6656Mi", "ephemeral-storage": "8Gi"}
    gpus = pods("jobset", "launch.hardware=nvidia-l4 x4", "launch.processes=4").container["resources"]["limits"]
    assert gpus["nvidia.com/gpu"] == "4"
    assert "nvidia.com/gpu" not in str(pods("job", *GPU, stage="report").spec)


def test_pods_have_time_to_save() -> None:
    assert pods("pytorchjob", "launch.grace_seconds=100.5").spec["terminationGracePeriodSeconds"] >= 101 + 10


def test_the_termination_message_is_where_kubernetes_reads_it() -> None:
    container = pods("pytorchjob").container
    assert pods("pytorchjob").environment["PODSCALE_TERMINATION_LOG"] == container["terminationMessagePath"]


def test_metrics_have_a_named_port() -> None:
    for backend, stage in (("pytorchjob", "train"), ("trainjob", "train"), ("job", "shard"), ("job", "evaluate")):
        ports = pods(backend, stage=stage).container["ports"]  # type: ignore[arg-type]
        assert {"name": "metrics", "containerPort": 9464, "protocol": "TCP"} in ports
    assert "ports" not in pods("job", stage="report").container


def test_hardware_selects_its_nodes() -> None:
    pod = pods("pytorchjob", *GPU)
    assert pod.spec["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod.spec["tolerations"]
    tpu = pods("jobset", "launch.hardware=tpu-v6e-2x2", "launch.processes=1")
    assert tpu.spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x2"
    assert tpu.container["resources"]["limits"]["google.com/tpu"] == "4"
    assert "nodeSelector" not in pods("job", *GPU, stage="shard").spec, "shards are made on any node"


@pytest.mark.parametrize(
    ("change", "selector"),
    [
        ("spot=true", {"cloud.google.com/gke-spot": "true"}),
        (
            "reservation=mine",
            {"cloud.google.com/reservation-name": "mine", "cloud.google.com/reservation-affinity": "specific"},
        ),
        ("compute_class=fast", {"cloud.google.com/compute-class": "fast"}),
        ("placement=compact", {"cloud.google.com/gke-placement-group": "digits"}),
        ("local_ssd=true", {"cloud.google.com/gke-ephemeral-storage-local-ssd": "true"}),
        ("node_selector={pool: a}", {"pool": "a"}),
    ],
)
def test_options_of_placement(change: str, selector: dict[str, str]) -> None:
    made = spec(f"launch.cluster.{change}")
    assert pod_placement.node_selector(made) == selector
    own = selector if change.startswith("node_selector") else {}
    assert pod_placement.node_selector(spec(f"launch.cluster.{change}", stage="shard")) == own, (
        "of the accelerators alone"
    )
    tainted = [taint["key"] for taint in pod_placement.tolerations(made)]
    assert ("cloud.google.com/gke-spot" in tainted) == change.startswith("spot")
    assert ("cloud.google.com/compute-class" in tainted) == change.startswith("compute")


def test_further_fields() -> None:
    changes = ("service_account=trainer", "priority_class=high", "runtime_class=gvisor", "image_pull_secrets=[a, b]")
    pod = pods("pytorchjob", *(f"launch.cluster.{change}" for change in changes)).spec
    assert pod["serviceAccountName"] == "trainer"
    assert pod["priorityClassName"] == "high"
    assert pod["runtimeClassName"] == "gvisor"
    assert pod["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    taint = "launch.cluster.tolerations=[{key: k, operator: Equal, value: v, effect: NoExecute, seconds: 5}]"
    toleration = {"key": "k", "operator": "Equal", "value": "v", "effect": "NoExecute", "tolerationSeconds": 5}
    assert toleration in pods("pytorchjob", taint).spec["tolerations"]


@pytest.mark.parametrize("backend", ["pytorchjob", "jaxjob", "trainjob", "jobset"])
def test_kueue_gets_queue_and_topology(backend: str) -> None:
    queued = ("launch.cluster.queue=team", "launch.cluster.topology=required")
    assert rendered(backend, *queued).job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    annotations = pods(backend, *queued).metadata["annotations"]
    assert annotations["kueue.x-k8s.io/podset-required-topology"] == "cloud.google.com/gce-topology-block"
    assert "kueue.x-k8s.io/queue-name" not in rendered(backend).job["metadata"]["labels"]
    assert "kueue.x-k8s.io/queue-name" not in rendered("job", *queued, stage="report").job["metadata"]["labels"]


@pytest.mark.parametrize(
    ("hardware", "networks", "daemon"),
    [
        ("nvidia-h100-80gb x8", 5, "tcpx-daemon"),
        ("nvidia-h100-mega-80gb x8", 9, "tcpxo-daemon"),
        ("nvidia-h200-141gb x8", 10, None),
        ("nvidia-b200 x8", 10, None),
    ],
)
def test_gpudirect(hardware: str, networks: int, daemon: str | None) -> None:
    pod = pods("jobset", f"launch.hardware={hardware}", *DIRECT)
    assert len(json.loads(pod.metadata["annotations"]["networking.gke.io/interfaces"])) == networks
    assert [one["name"] for one in pod.spec.get("initContainers", [])] == ([daemon] if daemon else [])
    declared = {volume["name"] for volume in pod.spec["volumes"]}
    used: set[Any] = set()
    for container in (*pod.spec["containers"], *pod.spec.get("initContainers", [])):
        used |= {mount["name"] for mount in container["volumeMounts"]}
    assert declared == used
    assert pod.container["command"][-4:-2] == ["podscale", "train"]
    networks_of_ours = "launch.cluster.annotations={networking.gke.io/interfaces: '[]'}"
    other = pods("jobset", f"launch.hardware={hardware}", *DIRECT, networks_of_ours)
    assert other.metadata["annotations"]["networking.gke.io/interfaces"] == "[]"


@pytest.mark.parametrize(
    ("hardware", "platforms"), [("cpu", "cpu"), ("nvidia-l4", "cuda,cpu"), ("tpu-v5e-2x2", "tpu,cpu")]
)
def test_jax_may_use_only_the_platform_of_the_hardware(hardware: str, platforms: str) -> None:
    on = (f"launch.hardware={hardware}", "launch.processes=1")
    assert pods("jobset", *on, "train.engine=jax").environment["JAX_PLATFORMS"] == platforms
    assert "JAX_PLATFORMS" not in pods("jobset", *on).environment, "PyTorch does not read it"
    assert "JAX_PLATFORMS" not in pods("job", *on, "train.engine=jax", stage="report").environment
    own = pods("jobset", *on, "train.engine=jax", "launch.cluster.env={JAX_PLATFORMS: ''}")
    assert own.environment["JAX_PLATFORMS"] == ""


def test_hosts_of_a_slice_declare_their_ports() -> None:
    tpus = ("launch.hardware=tpu-v5e-4x4", "launch.processes=1", "train.global_batch=512", "train.engine=jax")
    ports = {
        name: {port["name"]: port["containerPort"] for port in pods("jobset", *tpus, *more).container["ports"]}
        for name, more in {"one": (), "two": ("launch.cluster.slices=2",)}.items()
    }
    assert ports["one"] == {"rendezvous": 29500, "tpu": 8471, "tpu-metrics": 8431, "metrics": 9464}
    assert ports["two"] == {**ports["one"], "megascale": 8080}


def test_all_stages_of_a_privileged_run_have_one_user() -> None:
    """Files that root writes into the run directory could not be replaced by another user."""
    tpu = ("launch.hardware=tpu-v5e-2x2", "launch.processes=1")
    users = {
        pods("job", *tpu, stage=stage).spec["securityContext"]["runAsUser"]
        for stage in ("shard", "train", "evaluate", "report")
    }
    assert users == {0}
    assert pods("jobset", *tpu).container["securityContext"]["privileged"] is True
    assert pods("job", *tpu, stage="report").container["securityContext"].get("privileged") is not True


def test_yaml_equals_the_objects(tmp_path: object) -> None:
    import yaml

    made = rendered("trainjob", *GPU, *EVERYTHING).all_objects
    text = to_yaml(made)
    assert list(yaml.safe_load_all(text)) == list(made)
    assert "&id" not in text
    assert "\n              value: |\n" in text or "value: |" in text, "the run document is a readable block"
