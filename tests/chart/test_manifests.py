"""The kustomize manifests equal the chart's objects with the profile of the same name."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import helm
from tests.support.helm import GOOGLE, KUEUE, OPERATOR

MANIFESTS = helm.ROOT / "manifests"
OWN_LABELS = ("helm.sh/", "app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/version",
              "app.kubernetes.io/managed-by")  # fmt: skip
Objects = dict[tuple[str, str], Any]


def kustomize(folder: Path) -> list[dict[str, Any]]:
    program = shutil.which("kubectl") or shutil.which("kubectl", path=str(helm.cached_programs()))
    if program is None:
        pytest.skip("kubectl is neither on the PATH nor in the cluster's cache")
    done = subprocess.run([program, "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def compared(objects: list[dict[str, Any]]) -> Objects:
    """Return the compared objects by kind and name, without hooks, the namespace itself and the managed-by label."""
    return {
        (item["kind"], item["metadata"]["name"]): _bare(item)
        for item in objects
        if item["kind"] != "Namespace" and "helm.sh/hook" not in item["metadata"].get("annotations", {})
    }


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    metadata = {
        key: {name: value for name, value in entry.items() if not name.startswith(OWN_LABELS)}
        for key, entry in item["metadata"].items()
        if key in ("labels", "annotations")
    }
    namespace = item["metadata"].get("namespace")
    metadata = {"namespace": namespace} | {key: entry for key, entry in metadata.items() if entry}
    body = {key: entry for key, entry in item.items() if key not in ("metadata", "data")}
    data = {key: yaml.safe_load(text) for key, text in item.get("data", {}).items()}
    return {**body, "metadata": metadata, "data": data}


def same(left: Objects, right: Objects) -> None:
    assert left.keys() == right.keys()
    for name, item in left.items():
        assert item == right[name], name


def test_every_profile_has_an_overlay() -> None:
    assert {path.name for path in (MANIFESTS / "overlays").iterdir()} == {path.stem for path in helm.PROFILES}


@pytest.mark.parametrize("profile", helm.PROFILES, ids=lambda path: path.stem)
def test_overlays_are_what_the_chart_installs(profile: Path) -> None:
    installed = helm.template(profile, apis=[KUEUE])
    same(compared(kustomize(MANIFESTS / "overlays" / profile.stem)), compared(installed))


@pytest.mark.parametrize(("component", "api"), [("prometheus-operator", OPERATOR), ("google-prometheus", GOOGLE)])
def test_components_are_what_the_chart_installs(component: str, api: str, tmp_path: Path) -> None:
    folder = shutil.copytree(MANIFESTS, tmp_path / "manifests") / "overlays" / "mine"
    folder.mkdir()
    page = {"resources": ["../cpu"], "components": [f"../../components/{component}"]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(page), encoding="utf-8")
    same(compared(kustomize(folder)), compared(helm.template(helm.CHART / "ci" / "cpu.yaml", apis=[api])))


@pytest.mark.parametrize("profile", helm.PROFILES, ids=lambda path: path.stem)
def test_the_namespace_enforces_pod_security(profile: Path) -> None:
    (namespace,) = [item for item in kustomize(MANIFESTS / "overlays" / profile.stem) if item["kind"] == "Namespace"]
    level = "privileged" if profile.stem.startswith("tpu") else "restricted"
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == level
