"""terraform/gke creates the same cluster and node pools as the gcloud commands in docs/how-to/gke.md."""

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from podscale.hardware import find_hardware
from tests.support import helm

MODULE = helm.ROOT / "terraform" / "gke"
PAGE = (helm.ROOT / "docs" / "how-to" / "gke.md").read_text(encoding="utf-8")
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted(MODULE.glob("*.tf")))
PROFILES: dict[str, dict[str, Any]] = yaml.safe_load((MODULE / "profiles.yaml").read_text(encoding="utf-8"))
NODES = {"selector", "taint"}
"""Keys of profiles.yaml that GKE sets itself."""


def commanded(pool: str) -> dict[str, Any]:
    """Return the pool of the page's gcloud command with the keys of profiles.yaml."""
    (command,) = re.findall(rf"gcloud container node-pools create ({pool} (?:.*\\\n)*.*)\n", PAGE)
    arguments = command.replace("\\\n", " ").split()
    flags = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments[1:])
    assert flags.pop("cluster") == "podscale"
    assert flags.pop("location") == "$ZONE"
    scaled = flags.pop("enable-autoscaling", None) is not None
    count = int(flags.pop("num-nodes"))
    settings: dict[str, Any] = {"pool": pool, "machine_type": flags.pop("machine-type")}
    settings["min_nodes"], settings["max_nodes"] = (
        (int(flags.pop("min-nodes")), int(flags.pop("max-nodes"))) if scaled else (count, count)
    )
    assert count == settings["min_nodes"]
    if "accelerator" in flags:
        parts = dict(part.split("=") for part in flags.pop("accelerator").split(","))
        assert f'gpu_driver_version = "{parts.pop("gpu-driver-version").upper()}"' in SOURCE
        settings["accelerator"] = {"type": parts.pop("type"), "count": int(parts.pop("count"))}
        assert not parts
    if "tpu-topology" in flags:
        settings["tpu_topology"] = flags.pop("tpu-topology")
    if flags.pop("enable-gvnic", None) is not None:
        settings["gvnic"] = True
    assert not flags, "the module has no such options"
    return settings


def test_there_is_one_pool_for_each_profile_of_the_chart() -> None:
    assert set(PROFILES) == {path.stem for path in helm.PROFILES}
    allowed = re.search(r"setsubtract\(var\.profiles, \[(.*?)\]\)", SOURCE)
    assert allowed is not None
    assert set(re.findall(r'"(.*?)"', allowed[1])) == set(PROFILES)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_pool_is_the_one_that_the_page_makes(profile: str) -> None:
    pool = PROFILES[profile]
    assert {name: value for name, value in pool.items() if name not in NODES} == commanded(pool["pool"])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_pool_has_the_nodes_that_pods_ask_for(profile: str) -> None:
    values = yaml.safe_load((helm.CHART / "ci" / f"{profile}.yaml").read_text(encoding="utf-8"))
    hardware, pool = find_hardware(values["defaults"]["launch"]["hardware"]), PROFILES[profile]
    assert pool["selector"] == hardware.node_selector
    assert pool.get("taint") == hardware.resource, "the key of the taint is the name of the resource"
    assert hardware.machine in (None, pool["machine_type"])
    assert pool.get("tpu_topology") == hardware.topology
    if hardware.kind == "tpu":
        assert pool["max_nodes"] == hardware.hosts
    if "accelerator" in pool:
        label = pool["selector"]["cloud.google.com/gke-accelerator"]
        assert pool["accelerator"] == {"type": label, "count": hardware.accelerators}


def test_the_module_reads_all_of_a_pool() -> None:
    read = set(re.findall(r"\b(?:each\.value|autoscaling\.value|pool)\.(\w+)", SOURCE))
    assert {name for pool in PROFILES.values() for name in pool} <= read


@pytest.mark.parametrize(
    ("flag", "argument"),
    [
        ("--release-channel=regular", r'channel = "REGULAR"'),
        ("--machine-type=e2-standard-4 --num-nodes=1", r'machine_type = "e2-standard-4"'),
        ("--enable-dataplane-v2", r'datapath_provider += "ADVANCED_DATAPATH"'),
        ("--workload-pool=$PROJECT.svc.id.goog", r'workload_pool = "\$\{var\.project\}\.svc\.id\.goog"'),
        ("--enable-managed-prometheus", r"managed_prometheus \{\s+enabled = true"),
        ("GcsFuseCsiDriver", r"gcs_fuse_csi_driver_config \{\s+enabled = true"),
        ("GcpFilestoreCsiDriver", r"gcp_filestore_csi_driver_config \{\s+enabled = true"),
        ("--role=roles/storage.objectUser", r'"roles/storage\.objectUser"'),
        ("--role=roles/iam.workloadIdentityUser", r'"roles/iam\.workloadIdentityUser"'),
        ("--uniform-bucket-level-access", r"uniform_bucket_level_access = true"),
    ],
)
def test_cluster_and_bucket_are_those_of_the_page(flag: str, argument: str) -> None:
    assert flag in PAGE
    assert re.search(argument, SOURCE)


def test_apis_are_those_of_the_page() -> None:
    (command,) = re.findall(r"gcloud services enable (.*)", PAGE)
    listed = re.search(r"apis += \[(.*)\]", SOURCE)
    assert listed is not None
    assert re.findall(r'"(.*?)"', listed[1]) == command.split()


def test_terraform_can_read_it() -> None:
    terraform = shutil.which("terraform") or shutil.which("tofu")
    if terraform is None:
        pytest.skip("neither terraform nor tofu is on the PATH")
    done = subprocess.run([terraform, "fmt", "-check", "-diff", MODULE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
