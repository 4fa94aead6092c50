"""The profiles in ci/ agree with the hardware table, and their queues admit the jobs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.config import Defaults, RunConfig, loads
from podscale.hardware import find_hardware
from podscale.kubernetes.job_spec import build_job_spec
from podscale.kubernetes.render import render_job
from tests.support import helm
from tests.support.helm import KUEUE

QUEUED = [path for path in helm.PROFILES if "kueue" in yaml.safe_load(path.read_text(encoding="utf-8"))]


def config(profile: Path, *changes: str) -> RunConfig:
    """Return the digits document with the defaults that the profile installs."""
    defaults = helm.defaults(helm.template(profile, apis=[KUEUE]))
    preset = (helm.ROOT / "pipelines" / "presets" / "digits.yaml").read_text(encoding="utf-8")
    document = yaml.safe_load(preset) | {"launch": {}}
    document["run"].pop("workspace", None)
    return loads(yaml.safe_dump(document), "digits", changes, Defaults(yaml.safe_dump(defaults), "podscale-defaults"))


def pod(run: RunConfig) -> dict[str, Any]:
    """Return the pod template of its training job, for any kind of job."""

    def search(node: Any) -> Any:
        if isinstance(node, dict) and "containers" in node:
            return node
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        return next((spec for entry in inner if (spec := search(entry))), None)

    backend = "jobset" if run.launch.hardware and run.launch.hardware.startswith("tpu") else "pytorchjob"
    spec: dict[str, Any] = search(render_job(build_job_spec(run, "train"), backend).job)
    return spec


def flavor(profile: Path) -> dict[str, Any]:
    (resource_flavor,) = helm.kinds(helm.template(profile, apis=[KUEUE]), "ResourceFlavor")
    return resource_flavor


@pytest.mark.parametrize("profile", helm.PROFILES, ids=lambda path: path.stem)
def test_the_hardware_exists(profile: Path) -> None:
    hardware = find_hardware(str(config(profile).launch.hardware))
    assert hardware.machine is None or hardware.machine in profile.read_text(encoding="utf-8")


@pytest.mark.parametrize("profile", QUEUED, ids=lambda path: path.stem)
def test_flavors_are_the_nodes_of_the_hardware(profile: Path) -> None:
    hardware = find_hardware(str(config(profile).launch.hardware))
    spec = flavor(profile)["spec"]
    assert spec["nodeLabels"] == hardware.node_selector
    assert [toleration["key"] for toleration in spec["tolerations"]] == [hardware.resource]


@pytest.mark.parametrize("profile", QUEUED, ids=lambda path: path.stem)
def test_queues_cover_what_jobs_ask_for(profile: Path) -> None:
    """Kueue admits no job that requests a resource missing from the queue, or more than its quota."""
    hardware = find_hardware(str(config(profile).launch.hardware))
    nodes = hardware.hosts if hardware.kind == "tpu" else 2
    (queue,) = helm.kinds(helm.template(profile, apis=[KUEUE]), "ClusterQueue")
    (group,) = queue["spec"]["resourceGroups"]
    quota = {entry["name"]: number(entry["nominalQuota"]) for entry in group["flavors"][0]["resources"]}
    run = config(profile, f"launch.nodes={nodes}", "launch.processes=0", "train.global_batch=64")
    asked = pod(run)["containers"][0]["resources"]["requests"]
    assert set(asked) <= set(quota)
    assert all(nodes * number(amount) <= quota[name] for name, amount in asked.items()), (asked, quota)


def number(amount: object) -> float:
    """Convert a Kubernetes quantity to a number."""
    text = str(amount)
    for unit, factor in (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("G", 1e9), ("m", 1e-3)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)
