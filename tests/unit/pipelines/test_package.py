"""The compiled pipeline and components: what a backend is given, and that the committed files are current."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.config import load, loads
from podscale.config.telemetry import TelemetrySection
from podscale.kubernetes.job_spec import METRICS_PORT, build_job_spec, launched_stages
from podscale.kubernetes.render import render_job
from podscale.pipelines import presets
from podscale.pipelines.package import COMPONENT_FUNCTIONS, ENSEMBLE_PRESET, generated_files, package_pipeline
from podscale.util import env
from podscale.util.libyaml import SafeLoader
from tests.support.kfp_api import check_package
from tests.support.refusals import refused

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = (
    *(ROOT / "pipelines" / f"{name}.pipeline.yaml" for name in (presets.DEFAULT_PRESET, ENSEMBLE_PRESET)),
    *(ROOT / "components" / name / "component.yaml" for name in COMPONENT_FUNCTIONS),
)
STAGES = ("shard", "train", "evaluate", "report")


def without_version(text: str) -> str:
    return re.sub(r"^sdkVersion: .*$", "", text, flags=re.M)  # any kfp of the supported range compiles the same


@pytest.fixture(scope="module")
def generated() -> dict[Path, str]:
    """Files that the code compiles to. A fixture, so that collecting the tests does not take seconds."""
    return generated_files()


def test_every_package_that_is_generated_is_committed(generated: dict[Path, str]):
    assert set(generated) == set(COMMITTED)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_committed_packages_are_current(path: Path, generated: dict[Path, str]):
    written = path.read_text(encoding="utf-8")
    assert without_version(written) == without_version(generated[path]), "run: python -m podscale.pipelines.package"
    assert str(ROOT) not in written
    assert "://" not in written
    check_package(written)


class Package:
    """Compiled package, with accessors for its parts."""

    def __init__(self, *changes: str, kfp: str = "2.16") -> None:
        self.config = load(presets.resolve_preset(None), ["run.workspace=/workspace", *changes])
        self.text = package_pipeline(self.config, kfp=kfp)
        self.pipeline, self.platform = check_package(self.text)

    @property
    def inner(self) -> dict[str, Any]:
        """Tasks inside the exit handler."""
        return self.pipeline["components"]["comp-exit-handler-1"]["dag"]["tasks"]

    @property
    def tasks(self) -> dict[str, Any]:
        return {**self.inner, **self.pipeline["root"]["dag"]["tasks"]}

    def container(self, task: str) -> dict[str, Any]:
        return self.pipeline["deploymentSpec"]["executors"][f"exec-{task}"]["container"]

    def image(self, task: str) -> str:
        """Image of a task for the default values of the pipeline's parameters."""
        (name,) = re.findall(r"'pipelinechannel--(.+)'", self.container(task)["image"])
        return str(self.parameters[name]["defaultValue"])

    @property
    def parameters(self) -> dict[str, Any]:
        return self.pipeline["root"]["inputDefinitions"]["parameters"]

    @property
    def document(self) -> str:
        """Run document of the package."""
        return self.tasks["configure"]["inputs"]["parameters"]["document"]["runtimeValue"]["constant"]

    def kubernetes(self, task: str) -> dict[str, Any]:
        return self.platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"][f"exec-{task}"]


@pytest.fixture(scope="module")
def local() -> Package:
    """Training in the stage's own pod."""
    return Package(
        "launch.image=registry/podscale:1",
        "launch.retries=3",
        "launch.time_limit_hours=10",
        "launch.resources={cpus: 4, memory_gib: 8.5, accelerator: nvidia.com/gpu, accelerators: 2}",
    )


@pytest.fixture(scope="module")
def launched() -> Package:
    """Training by a job, on GPU nodes, with a volume."""
    return Package(
        "launch.backend=pytorchjob",
        "launch.hardware=nvidia-l4",
        "launch.processes=1",
        "launch.nodes=2",
        "launch.shard_pods=3",
        "launch.image=registry/podscale-gpu:1",
        "launch.launcher_image=registry/podscale-tools:1",
        "launch.cluster.workspace_claim=data",
        "launch.cluster.image_pull_secrets=[registry]",
        "launch.cluster.image_pull_policy=IfNotPresent",
        "launch.cluster.volumes=[{path: /keys, secret: keys}, {path: /own, config_map: own}]",
        "launch.resources.shm_gib=3",
    )


def test_the_stages_follow_each_other_inside_the_exit_handler(local):
    assert {name: task.get("dependentTasks", []) for name, task in local.inner.items()} == {
        "configure": [],
        "shard": ["configure"],
        "train": ["configure", "shard"],
        "evaluate": ["configure", "shard", "train"],
        "report": ["configure", "evaluate", "shard"],
    }
    summary = local.pipeline["root"]["dag"]["tasks"]["summary"]
    assert summary["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def test_a_document_with_formats_has_an_export_task_after_the_report():
    package = Package("export.formats=[onnx, safetensors]", "launch.image=registry/podscale:1")
    assert package.inner["export"]["dependentTasks"] == ["configure", "report", "shard", "train"]
    assert package.image("export") == "registry/podscale:1"
    assert not package.inner["export"]["cachingOptions"].get("enableCache")
    assert output_types(package.pipeline, "export") == {"exported": "system.Model"}


@pytest.mark.parametrize("formats", ["html", "onnx, html-int8", "html-int8, html"])
def test_a_document_with_a_page_has_it_as_an_artifact_that_the_interface_shows(formats: str):
    package = Package(
        f"export.formats=[{formats}]",
        "launch.image=registry/podscale:1",
        "launch.cluster.env={PODSCALE_WEB_RUNTIME: /workspace/web.tgz}",
    )
    assert package.inner["export"]["dependentTasks"] == ["configure", "report", "shard", "train"]
    assert package.image("export") == "registry/podscale:1"
    assert output_types(package.pipeline, "export") == {"exported": "system.Model", "page": "system.HTML"}
    assert variables(package, "export")[env.WEB_RUNTIME] == "/workspace/web.tgz"


def output_types(pipeline: dict[str, Any], component: str) -> dict[str, str]:
    """Return the types of a component's output artifacts by name."""
    outputs = pipeline["components"][f"comp-{component}"].get("outputDefinitions", {}).get("artifacts", {})
    return {name: artifact["artifactType"]["schemaTitle"] for name, artifact in outputs.items()}


def test_several_pods_pack_before_the_shard_stage_completes(launched):
    loop = launched.inner["for-loop-3"]
    assert json.loads(loop["parameterIterator"]["items"]["raw"]) == [0, 1, 2]
    assert loop["iteratorPolicy"]["parallelismLimit"] == 3
    assert launched.inner["shard"]["dependentTasks"] == ["configure", "for-loop-3"]
    assert launched.image("pack") == "registry/podscale-gpu:1"


@pytest.mark.parametrize("cache", [True, False])
def test_only_shards_are_cached_and_every_task_sets_it(local, cache):
    pipeline = yaml.load_all(local.text if cache else package_pipeline(local.config, cache=False), Loader=SafeLoader)
    spec = next(iter(pipeline))
    tasks = {**spec["components"]["comp-exit-handler-1"]["dag"]["tasks"], **spec["root"]["dag"]["tasks"]}
    cached = {n: t["cachingOptions"].get("enableCache", False) for n, t in tasks.items() if n != "exit-handler-1"}
    assert cached == {**dict.fromkeys(("configure", "train", "evaluate", "report", "summary"), False), "shard": cache}


def test_the_shard_stage_gets_the_data_section_only(local):
    """Other inputs would make KFP's cached result invalid."""
    inputs = local.tasks["shard"]["inputs"]["parameters"]
    assert {name for name in inputs if "image" not in name} == {"data", "workspace"}
    assert inputs["data"] == {"taskOutputParameter": {"producerTask": "configure", "outputParameterKey": "data"}}
    other = Package("train.schedule.learning_rate=0.5", "run.id=other")
    assert other.tasks["shard"]["inputs"]["parameters"] == inputs
    assert other.document != local.document
    assert other.pipeline["pipelineInfo"]["name"] == local.pipeline["pipelineInfo"]["name"], "one cache for all runs"


def variables(package: Package, task: str) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in package.container(task).get("env", ())}


def test_tasks_that_run_a_stage_serve_metrics_to_the_cluster():
    secured = Package("launch.cluster.metrics_tls_secret=tls", "launch.cluster.metrics_token_secret=token")
    sharding = json.loads(variables(secured, "shard")[env.TELEMETRY])
    evaluating = json.loads(secured.document)
    for section in (sharding["telemetry"], evaluating["telemetry"]):
        served = TelemetrySection.model_validate(section)
        assert (served.address, served.port) == ("0.0.0.0", METRICS_PORT)
        assert (served.tls_key, served.bearer_token_file) == (
            "/etc/podscale/metrics-tls/tls.key",
            "/etc/podscale/metrics-token/token",
        )
    assert sharding["run"] == "digits"
    for task in ("shard", "evaluate"):
        mounted = {volume["mountPath"]: volume["secretName"] for volume in secured.kubernetes(task)["secretAsVolume"]}
        assert mounted == {"/etc/podscale/metrics-tls": "tls", "/etc/podscale/metrics-token": "token"}
        assert secured.kubernetes(task)["podMetadata"]["labels"]["app.kubernetes.io/component"] == task
    assert env.TELEMETRY not in variables(Package("telemetry.enabled=false"), "shard")


def test_the_parameters_have_types_and_the_values_of_the_document(local):
    typed = {name: (content["parameterType"], content["defaultValue"]) for name, content in local.parameters.items()}
    train = local.config.train
    assert typed == {
        "run_id": ("STRING", "digits"),
        "source": ("STRING", "digits"),
        "epochs": ("NUMBER_DOUBLE", train.epochs),
        "global_batch": ("NUMBER_INTEGER", train.global_batch),
        "learning_rate": ("NUMBER_DOUBLE", train.schedule.learning_rate),
        "overrides": ("LIST", []),
        "image": ("STRING", "registry/podscale:1"),
        "launcher_image": ("STRING", "podscale-tools:latest"),
    }


def test_the_first_task_and_the_exit_handler_get_the_same_parameters(local):
    """Each placeholder is a whole input, because KFP does not fill in parts of a text."""
    first, last = (dict(local.tasks[name]["inputs"]["parameters"]) for name in ("configure", "summary"))
    for name in local.parameters:
        assert first[name] == {"componentInputParameter": f"pipelinechannel--{name}"}
        assert last[name] == {"componentInputParameter": name}
    placeholders = {
        "job_id": "{{$.pipeline_job_uuid}}",
        "created": "{{$.pipeline_job_create_time_utc}}",
        "scheduled": "{{$.pipeline_job_schedule_time_utc}}",
    }
    for inputs in (first, last):
        assert {name: inputs[name]["runtimeValue"]["constant"] for name in placeholders} == placeholders
        assert inputs["document"]["runtimeValue"]["constant"] == local.document
    for name in ("train", "evaluate", "report"):
        source = local.tasks[name]["inputs"]["parameters"]["document"]
        assert source == {"taskOutputParameter": {"producerTask": "configure", "outputParameterKey": "resolved"}}


def test_retries_and_pods_end_at_the_time_limit_of_the_run(local):
    for name in STAGES:
        policy = local.tasks[name]["retryPolicy"]
        assert policy["maxRetryCount"] == 3
        assert policy["backoffMaxDuration"] == "36000s"
        assert local.kubernetes(name)["activeDeadlineSeconds"] == "36000"
    for name in ("configure", "summary"):
        assert "retryPolicy" not in local.tasks[name]


def test_image_and_resources_come_from_the_document(local):
    for name in STAGES:
        assert local.image(name) == "registry/podscale:1"
        assert local.container(name)["resources"]["resourceCpuLimit"] == "4"
        assert local.container(name)["resources"]["resourceMemoryLimit"] == "8704Mi"
    accelerated = [name for name in STAGES if "accelerator" in local.container(name)["resources"]]
    assert sorted(accelerated) == ["evaluate", "train"]
    assert local.container("train")["resources"]["accelerator"]["resourceCount"] == "2"


def test_a_launcher_is_small_and_needs_no_accelerator(launched):
    for name in ("configure", "train", "summary"):
        container = launched.container(name)
        assert launched.image(name) == "registry/podscale-tools:1"
        assert container["resources"]["resourceMemoryLimit"] == "1Gi"
        assert "accelerator" not in container["resources"]
        assert "cloud.google.com/gke-accelerator" not in launched.kubernetes(name).get("nodeSelector", {})
        assert launched.kubernetes(name)["podMetadata"]["labels"]["app.kubernetes.io/component"] == "launcher"
    evaluate = launched.kubernetes("evaluate")
    assert launched.container("evaluate")["resources"]["accelerator"]["resourceType"] == "nvidia.com/gpu"
    assert evaluate["nodeSelector"]["labels"] == {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    assert "nvidia.com/gpu" in [toleration.get("key") for toleration in evaluate["tolerations"]]


def test_every_pod_has_the_same_volumes_and_runs_without_root(launched):
    for name in ("configure", "pack", *STAGES, "summary"):
        config_of = launched.kubernetes(name)
        assert [(c["constant"], c["mountPath"]) for c in config_of["pvcMount"]] == [("data", "/workspace")]
        assert [(s["secretName"], s["mountPath"]) for s in config_of["secretAsVolume"]] == [("keys", "/keys")]
        assert [(c["configMapName"], c["mountPath"]) for c in config_of["configMapAsVolume"]] == [("own", "/own")]
        memory = {e["mountPath"]: e["sizeLimit"] for e in config_of["emptyDirMounts"] if e.get("medium") == "Memory"}
        assert set(memory) == {"/dev/shm"}
        assert [secret["secretName"] for secret in config_of["imagePullSecret"]] == ["registry"]
        assert config_of["imagePullPolicy"] == "IfNotPresent"
        assert config_of["securityContext"] == {"runAsUser": "65532", "runAsGroup": "65532", "runAsNonRoot": True}
    shared = {e["mountPath"]: e["sizeLimit"] for e in launched.kubernetes("evaluate")["emptyDirMounts"]}
    assert shared["/dev/shm"] == "3Gi"


def test_pods_of_the_pipeline_have_no_label_of_a_job(launched):
    job = render_job(build_job_spec(launched.config, "train"), "pytorchjob").job["metadata"]["labels"]
    for name in ("configure", "pack", *STAGES, "summary"):
        labels = launched.kubernetes(name)["podMetadata"]["labels"]
        assert not {"podscale.dev/run", "podscale.dev/stage"} & set(labels)
        assert labels["app.kubernetes.io/name"] == job["app.kubernetes.io/name"]


def test_a_package_for_kfp_2_15_has_no_newer_fields(launched):
    older = package_pipeline(launched.config, kfp="2.15")
    assert "securityContext" not in older
    assert "securityContext" in launched.text
    with refused("2.15, 2.16", field="--kfp", got="1.8"):
        package_pipeline(launched.config, kfp="1.8")


@pytest.mark.parametrize("volume", ["bucket: photos", "nfs: 'server:/export'"])
def test_a_volume_that_no_task_of_kfp_can_mount_is_refused(volume):
    security = ["launch.cluster.security=privileged"] if "nfs" in volume else []
    with refused("PersistentVolume", field="launch.cluster.volumes", got="/photos"):
        Package(f"launch.cluster.volumes=[{{path: /photos, {volume}}}]", *security)


def test_the_complete_document_travels_inline(local):
    assert loads(local.document).launch.image == "registry/podscale:1"


def test_snapshots_of_an_ensemble_are_collapsed_in_parallel_before_they_are_evaluated():
    spec = next(yaml.load_all((ROOT / "pipelines/digits-ensemble.pipeline.yaml").read_text(), Loader=SafeLoader))
    dags = {name: entry["dag"]["tasks"] for name, entry in spec["components"].items() if "dag" in entry}
    loop_name = next(name for name, tasks in dags.items() if "collapse" in tasks)
    stages = next(tasks for tasks in dags.values() if "evaluate" in tasks)
    loop = next(name for name, task in stages.items() if task["componentRef"]["name"] == loop_name)
    assert json.loads(stages[loop]["parameterIterator"]["items"]["raw"]) == [0, 1, 2]
    assert stages[loop]["iteratorPolicy"]["parallelismLimit"] == 3
    assert "train" in stages[loop]["dependentTasks"]
    assert loop in stages["evaluate"]["dependentTasks"]
    caching = dags[loop_name]["collapse"]["cachingOptions"]
    assert not caching.get("enableCache")


def test_components_declare_typed_artifacts_and_install_nothing():
    artifacts = {}
    for name in COMPONENT_FUNCTIONS:
        text = (ROOT / "components" / name / "component.yaml").read_text()
        spec = yaml.load(text, Loader=SafeLoader)
        artifacts[name] = output_types(spec, spec["pipelineInfo"]["name"])
        assert "pip install" not in text
    assert artifacts == {
        "configure": {},
        "pack": {},
        "shard": {"shard_set": "system.Dataset"},
        "train": {"model": "system.Model"},
        "collapse": {"model": "system.Model"},
        "evaluate": {"metrics": "system.Metrics", "confusion": "system.ClassificationMetrics"},
        "report": {"page": "system.HTML", "card": "system.Markdown"},
        "export": {"exported": "system.Model"},
        "export_page": {"exported": "system.Model", "page": "system.HTML"},
        "summary": {"page": "system.Markdown"},
        "cells": {},
        "findings": {"page": "system.HTML", "text": "system.Markdown"},
    }


@pytest.mark.parametrize("name", list(COMPONENT_FUNCTIONS))
def test_every_component_has_a_readme_that_names_its_inputs_and_outputs(name):
    readme = (ROOT / "components" / name / "README.md").read_text()
    spec = yaml.load((ROOT / "components" / name / "component.yaml").read_text(), Loader=SafeLoader)
    (component,) = spec["components"].values()
    for direction in ("inputDefinitions", "outputDefinitions"):
        for kind in component.get(direction, {}).values():
            for item in kind:
                assert f"`{item}`" in readme


@pytest.mark.parametrize("path", COMMITTED[:2], ids=lambda path: path.name)
def test_committed_pipelines_use_the_volume_of_the_chart(path: Path) -> None:
    pipeline, platform = check_package(path.read_text())
    for executor in platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values():
        mounts = [(mount["constant"], mount["mountPath"]) for mount in executor["pvcMount"]]
        assert mounts == [(presets.CHART_CLAIM, presets.CHART_WORKSPACE)]
    assert pipeline["root"]["inputDefinitions"]["parameters"]["image"]["defaultValue"]


def test_every_task_writes_its_error_to_the_status_of_its_pod(launched):
    for name in ("configure", "pack", *STAGES, "summary"):
        assert variables(launched, name)[env.TERMINATION_LOG] == "/dev/termination-log"


def test_on_a_slice_of_several_machines_the_evaluation_is_launched_too() -> None:
    package = Package(
        *("launch.backend=jobset", "launch.hardware=tpu-v5e-4x4", "launch.processes=1", "train.engine=jax"),
        *("launch.image=registry/podscale-tpu:1", "launch.launcher_image=registry/tools:1", "train.global_batch=512"),
        "launch.cluster.workspace_claim=data",
    )
    for name in ("train", "evaluate"):
        assert package.image(name) == "registry/tools:1"
        assert "accelerator" not in package.container(name)["resources"]
        assert package.kubernetes(name)["podMetadata"]["labels"]["app.kubernetes.io/component"] == "launcher"
    assert package.image("report") == "registry/podscale-tpu:1"
    assert launched_stages(package.config) == ("train", "evaluate")


def test_a_task_of_several_pods_is_refused() -> None:
    slice_ = ["launch.hardware=tpu-v5e-4x4", "launch.processes=1", "launch.nodes=1", "train.global_batch=512"]
    config = load(presets.resolve_preset(None), ["run.workspace=/workspace", *slice_])
    with refused("launch.backend=auto", field="launch.backend", got="local"):
        package_pipeline(config)


@pytest.mark.parametrize("name", presets.preset_names())
def test_presets_for_several_machines_are_launched_as_jobs(name: str) -> None:
    """A task of a pipeline is one pod, and `local` means that it trains there."""
    launch = load(presets.resolve_preset(name)).launch
    assert launch.nodes == 1 or launch.backend != "local"


def test_a_preset_of_many_machines_compiles() -> None:
    config = load(presets.resolve_preset("goyal2017-8k"), ["launch.cluster.workspace_claim=w"])
    assert package_pipeline(config)
