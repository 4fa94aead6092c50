"""Servers of a run's model on a cluster: the Deployment with its objects, and KServe's InferenceService."""

from typing import Any

import pytest

from podscale.cli import main
from podscale.cli.documents import render_server
from podscale.cli.options import ServerOptions
from podscale.config import load
from podscale.errors import InputError
from podscale.pipelines import presets
from podscale.serving.options import ServeOptions
from tests.support import crds
from tests.support.outcomes import assert_error
from tests.support.pod_security import violations
from tests.support.refusals import refused
from tools.job_manifests import GPU, JAX, ONE_RANK, VOLUME

PROBED = {"startupProbe": "/livez", "readinessProbe": "/healthz", "livenessProbe": "/livez"}


def objects(
    *changes: str, backend: str | None = None, preset: str = "digits", **options: Any
) -> dict[str, dict[str, Any]]:
    """Return the rendered objects by kind."""
    config = load(presets.resolve_preset(preset), (*VOLUME, *changes))
    rendered = render_server(config, backend, ServerOptions(**options))
    return {one["kind"]: one for one in rendered}


def pod(*changes: str, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = objects(*changes, **options)["Deployment"]["spec"]["template"]["spec"]
    return found


def test_the_service_the_budget_and_the_policy_select_the_pods() -> None:
    found = objects(max_replicas=3)
    deployment = found["Deployment"]["spec"]
    selector = deployment["selector"]["matchLabels"]
    assert selector.items() <= deployment["template"]["metadata"]["labels"].items()
    assert found["Service"]["spec"]["selector"] == selector
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == selector
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == selector
    assert {one["metadata"]["name"] for one in found.values()} == {"digits-serve"}
    assert found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "digits-serve"


def test_ports_agree() -> None:
    found = objects()
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    command = container["command"]
    assert str(ports["http"]) == command[command.index("--port") + 1]
    assert str(ports["metrics"]) == command[command.index("--metrics-port") + 1]
    (service,) = found["Service"]["spec"]["ports"]
    assert service["targetPort"] == "http"
    allowed = [rule["ports"][0]["port"] for rule in found["NetworkPolicy"]["spec"]["ingress"]]
    assert allowed == [ports["http"], ports["metrics"]]
    for probe, path in PROBED.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "metrics"}


def test_the_command_is_one_that_serve_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    (container,) = pod()["containers"]
    program, *arguments = container["command"]
    assert program == "podscale"
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert "/workspace/runs/digits" in printed, "all its options are known, and only the model is missing"


def test_the_pod_outlives_the_drain_and_the_grace() -> None:
    spec = pod()
    (container,) = spec["containers"]
    command = container["command"]
    seconds = [int(command[command.index(name) + 1]) for name in ("--drain-seconds", "--grace-seconds")]
    assert spec["terminationGracePeriodSeconds"] > sum(seconds)
    assert seconds[1] == ServeOptions().grace_seconds


@pytest.mark.parametrize("changes", [(), ("launch.hardware=nvidia-l4", "launch.processes=1", *GPU)])
def test_the_pod_is_admitted_where_security_is_restricted(changes: tuple[str, ...]) -> None:
    assert violations(pod(*changes)) == []


def test_the_workspace_is_mounted_read_only_and_not_for_a_url() -> None:
    mounts = {mount["name"]: mount for mount in pod()["containers"][0]["volumeMounts"]}
    assert mounts["workspace"]["readOnly"] is True
    remote = pod(model="s3://bucket/runs/digits")
    assert remote["containers"][0]["command"][2] == "s3://bucket/runs/digits"
    names = {mount["name"] for mount in remote["containers"][0]["volumeMounts"]}
    assert names == {volume["name"] for volume in remote["volumes"]} == {"tmp", "shm"}


def test_replicas_belong_to_the_autoscaler_if_there_is_one() -> None:
    fixed = objects(replicas=3)
    assert fixed["Deployment"]["spec"]["replicas"] == 3
    assert "HorizontalPodAutoscaler" not in fixed
    scaled = objects(replicas=2, max_replicas=5)
    assert "replicas" not in scaled["Deployment"]["spec"]
    autoscaler = scaled["HorizontalPodAutoscaler"]["spec"]
    assert (autoscaler["minReplicas"], autoscaler["maxReplicas"]) == (2, 5)


def test_a_process_serves_on_each_gpu() -> None:
    (container,) = pod("launch.hardware=nvidia-l4 x2", "launch.processes=2", *GPU)["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert container["command"][container["command"].index("--processes") + 1] == "2"


def test_requests_are_those_of_the_document_or_two_cores() -> None:
    def requested(*changes: str) -> dict[str, str]:
        (container,) = pod(*changes)["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        found: dict[str, str] = container["resources"]["requests"]
        return found

    assert (requested()["cpu"], requested()["memory"]) == ("2", "4Gi")
    named = requested("launch.resources.cpus=7", "launch.resources.memory_gib=9")
    assert (named["cpu"], named["memory"]) == ("7", "9Gi")


@pytest.mark.parametrize(
    ("model", "uri"),
    [
        ("/workspace/models/digits", "pvc://podscale-workspace/models/digits"),
        ("gs://bucket/models", "gs://bucket/models"),
    ],
)
def test_kserve_reads_a_repository(model: str, uri: str) -> None:
    found = objects(backend="kserve", model=model, replicas=2, max_replicas=4, serving_runtime="triton")
    crds.validate(found["InferenceService"])
    predictor = found["InferenceService"]["spec"]["predictor"]
    assert predictor["model"]["storageUri"] == uri
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (2, 4)
    assert predictor["model"]["runtime"] == "triton"


def test_validation_of_the_inference_service_sees_unknown_fields() -> None:
    service = objects(backend="kserve", model="gs://bucket/models")["InferenceService"]
    service["spec"]["predictor"]["model"]["format"] = "onnx"
    with pytest.raises(AssertionError):
        crds.validate(service)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"replicas": 0}, "--replicas: must be at least 1"),
        ({"replicas": 3, "max_replicas": 2}, "--max-replicas: fewer than --replicas"),
        ({"backend": "pytorchjob"}, "--backend: cannot serve"),
        ({"backend": "kserve"}, "--model: KServe's runtimes read a model repository"),
        ({"backend": "kserve", "model": "/elsewhere"}, "--model: not in the workspace claim"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError) as error:
        objects(**options)
    assert str(error.value).startswith(problem)


def test_options_of_other_stages_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options, field in ((["--replicas", "3"], "--stage"), (["--stage", "serve", "--images", "/x"], "--images")):
        assert_error(main(["render", "digits", *options]), capsys.readouterr().err, field=field)


def test_tpus_are_refused() -> None:
    with refused(field="launch.hardware"):
        objects("launch.hardware=tpu-v5e-2x2", *ONE_RANK, *JAX)
