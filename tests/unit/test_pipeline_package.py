"""The compiled pipeline and components: what a backend is given, and that the committed files are current."""

import json
import re
from pathlib import Path

import pytest
import yaml

from podscale.config import load, loads
from podscale.pipelines import presets
from podscale.pipelines.package import COMPONENTS, committed, package

ROOT = Path(__file__).resolve().parents[2]


def without_version(text: str) -> str:
    return re.sub(r"^sdkVersion: .*$", "", text, flags=re.M)  # any kfp of the supported range compiles the same


@pytest.mark.parametrize("path", list(committed()), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_committed_packages_are_current(path: Path):
    written = path.read_text(encoding="utf-8")
    assert without_version(written) == without_version(committed()[path]), "run: python -m podscale.pipelines.package"
    assert str(ROOT) not in written
    assert "://" not in written


@pytest.fixture(scope="module")
def compiled() -> dict:
    config = load(
        presets.resolve(None),
        [
            "launch.image=registry/podscale:1",
            "launch.retries=3",
            "launch.time_limit_hours=10",
            "launch.resources={cpus: 4, memory_gib: 8.5, accelerator: nvidia.com/gpu, accelerators: 2}",
        ],
    )
    return yaml.safe_load(package(config))


def tasks(compiled: dict) -> dict:
    inner = compiled["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    return {**inner, **compiled["root"]["dag"]["tasks"]}


def container(compiled: dict, task: str) -> dict:
    return compiled["deploymentSpec"]["executors"][f"exec-{task}"]["container"]


def test_the_stages_follow_each_other_inside_the_exit_handler(compiled):
    inner = compiled["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert {name: task.get("dependentTasks", []) for name, task in inner.items()} == {
        "shard": [],
        "train": ["shard"],
        "evaluate": ["shard", "train"],
        "report": ["evaluate", "shard"],
    }
    summary = compiled["root"]["dag"]["tasks"]["summary"]
    assert summary["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def test_only_shards_are_cached_and_every_task_says_so_itself(compiled):
    cached = {
        name: task["cachingOptions"].get("enableCache", False)
        for name, task in tasks(compiled).items()
        if name != "exit-handler-1"
    }
    assert cached == {"shard": True, "train": False, "evaluate": False, "report": False, "summary": False}


def test_the_shard_stage_is_given_the_data_section_alone(compiled):
    inputs = tasks(compiled)["shard"]["inputs"]["parameters"]
    assert set(inputs) == {"data", "workspace"}
    assert json.loads(inputs["data"]["runtimeValue"]["constant"])["source"] == "digits"
    other = yaml.safe_load(package(load(presets.resolve(None), ["train.schedule.learning_rate=0.5", "run.id=other"])))
    assert tasks(other)["shard"]["inputs"]["parameters"] == inputs
    assert tasks(other)["train"]["inputs"] != tasks(compiled)["train"]["inputs"]
    assert other["pipelineInfo"]["name"] == compiled["pipelineInfo"]["name"], "the cache is kept per pipeline name"


def test_retries_last_as_long_as_the_run(compiled):
    for name in ("shard", "train", "evaluate", "report"):
        policy = tasks(compiled)[name]["retryPolicy"]
        assert policy["maxRetryCount"] == 3
        assert policy["backoffMaxDuration"] == "36000s"
    assert "retryPolicy" not in tasks(compiled)["summary"]


def test_image_and_resources_come_from_the_document(compiled):
    for name in COMPONENTS:
        assert container(compiled, name)["image"] == "registry/podscale:1"
        assert container(compiled, name)["resources"]["cpuLimit"] == 4.0
        assert container(compiled, name)["resources"]["memoryLimit"] == pytest.approx(8.5 * 2**30 / 1e9, rel=1e-3)
    accelerated = [name for name in COMPONENTS if "accelerator" in container(compiled, name)["resources"]]
    assert sorted(accelerated) == ["evaluate", "train"]
    assert container(compiled, "train")["resources"]["accelerator"]["resourceCount"] == "2"


def test_the_document_travels_inline_and_whole(compiled):
    constant = tasks(compiled)["train"]["inputs"]["parameters"]["document"]["runtimeValue"]["constant"]
    assert loads(constant).launch.image == "registry/podscale:1"


def test_components_declare_typed_artifacts_and_install_nothing():
    found = {}
    for name in COMPONENTS:
        text = (ROOT / "components" / name / "component.yaml").read_text()
        spec = yaml.safe_load(text)
        outputs = spec["components"][f"comp-{name}"].get("outputDefinitions", {}).get("artifacts", {})
        found[name] = {key: value["artifactType"]["schemaTitle"] for key, value in outputs.items()}
        assert "pip install" not in text
    assert found == {
        "shard": {"shard_set": "system.Dataset"},
        "train": {"model": "system.Model"},
        "evaluate": {"metrics": "system.Metrics", "confusion": "system.ClassificationMetrics"},
        "report": {"page": "system.HTML", "card": "system.Markdown"},
        "summary": {"page": "system.Markdown"},
    }


@pytest.mark.parametrize("name", list(COMPONENTS))
def test_every_component_has_a_readme_that_names_its_inputs_and_outputs(name):
    readme = (ROOT / "components" / name / "README.md").read_text()
    spec = yaml.safe_load((ROOT / "components" / name / "component.yaml").read_text())["components"][f"comp-{name}"]
    for direction in ("inputDefinitions", "outputDefinitions"):
        for kind in spec.get(direction, {}).values():
            for item in kind:
                assert f"`{item}`" in readme
