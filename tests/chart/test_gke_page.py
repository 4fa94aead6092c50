"""docs/how-to/gke.md creates the node pools of the profiles."""

import re
from pathlib import Path

import pytest
import yaml

from podscale.hardware import find_hardware
from podscale.kubernetes.resources import KIND_PROVIDERS
from tests.support import helm

PAGE = (helm.ROOT / "docs" / "how-to" / "gke.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("profile", helm.PROFILES, ids=lambda path: path.stem)
def test_the_pool_of_a_profile_is_of_its_machines(profile: Path) -> None:
    name = yaml.safe_load(profile.read_text(encoding="utf-8"))["defaults"]["launch"]["hardware"]
    hardware, pool = find_hardware(name), profile.stem.rpartition("-")[2]
    (command,) = re.findall(rf"gcloud container node-pools create {pool} (?:.*\\\n)*.*\n", PAGE)
    if hardware.machine is not None:
        assert f"--machine-type={hardware.machine} " in command
    if hardware.kind == "gpu":
        label = hardware.node_selector["cloud.google.com/gke-accelerator"]
        assert f"--accelerator=type={label},count={hardware.accelerators}," in command
    if hardware.kind == "tpu":
        assert f"--tpu-topology={hardware.topology} " in command
        assert f"--max-nodes={hardware.hosts}\n" in command
    assert f"| `{profile.stem}`: " in PAGE, "the page has no price for this pool"


def test_operators_are_installed_as_doctor_says() -> None:
    for group in ("kubeflow.org", "jobset.x-k8s.io", "kueue.x-k8s.io"):
        assert KIND_PROVIDERS[group].install in PAGE


def test_the_pools_of_the_queue_are_of_the_profile_s_machines() -> None:
    """Kueue compares the labels that it knows with the node selector of the pods."""
    hardware = find_hardware("nvidia-h100-80gb x8")
    for flavor in helm.pools_of_the_gke_page()["kueue"]["flavors"]:
        assert hardware.node_selector.items() <= flavor["nodeLabels"].items()
        assert hardware.resource in [toleration["key"] for toleration in flavor["tolerations"]]
