"""The first task of a pipeline checks the policy of its namespace, also for images that a run's parameters name."""

from dataclasses import replace

import pytest
import yaml

from podscale.components import steps
from podscale.components.run_parameters import PipelineJob, RunParameters
from podscale.config import RunConfig
from podscale.errors import ExitCode
from tests.support import rendering
from tests.support.fake_cluster import FakeCluster

ALLOWED = ("launch.image=allowed.example/base:1", "launch.launcher_image=allowed.example/tools:1")


@pytest.fixture
def document(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Return a document that the policy allows, in a pod of the cluster."""
    text = yaml.safe_dump({"images": ["allowed.example"]})
    cluster.put("configmaps", {"metadata": {"name": "podscale-defaults"}, "data": {"policy.yaml": text}})
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(steps, "check_workspace_mounted", lambda workspace: None)
    return rendering.document("digits", *ALLOWED)


def configure(document: RunConfig, **parameters: str) -> str:
    values = replace(RunParameters.of(document), **parameters)
    return steps.configure(document.model_dump_json(), values, PipelineJob())[0]


@pytest.mark.parametrize("parameter", ["image", "launcher_image"])
def test_an_image_of_a_parameter_is_refused_in_the_first_task(
    document: RunConfig, capsys: pytest.CaptureFixture[str], parameter: str
) -> None:
    assert "allowed.example/base:1" in configure(document)
    with pytest.raises(SystemExit) as exit_status:
        configure(document, **{parameter: "other.example/base:1"})
    assert exit_status.value.code == ExitCode.BAD_INPUT
    assert f"launch.{parameter}: " in capsys.readouterr().err


@pytest.mark.parametrize("obstacle", ["role", "no account"])
def test_a_pod_that_cannot_read_the_policy_goes_on(
    document: RunConfig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    if obstacle == "role":
        cluster.denied.add(("get", "configmaps"))
    else:
        monkeypatch.setenv("KUBECONFIG", "/no/such/file")
    assert "other.example/base:1" in configure(document, image="other.example/base:1")
