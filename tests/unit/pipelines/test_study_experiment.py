"""Experiment of Katib: its content, when it is written, and that a choice of Katib becomes a trial's parameters."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.cli import main
from podscale.errors import ExitCode
from podscale.study import StudyDocument
from podscale.study.experiment_trial import parse_choice
from podscale.study.grid import TrialGrid
from podscale.study.search_space import narrow_study
from tests.support.fake_cluster import FakeCluster
from tests.support.outcomes import assert_error

STUDY = """
name: tried
run: {train: {epochs: 2}, launch: {processes: 1}}
set: {run.workspace: /workspace, launch.cluster.workspace_claim: volume}
seeds: [1, 2]
grid: {train.global_batch: [64, 128]}
learning_rate: {at: 0.1, sweep: {factors: [0.5, 1, 2]}}
variants:
  - name: as it is
  - {name: "nesterov, off", set: {train.optimizer.nesterov: false}}
"""
PARAMETERS = {"variant": "nesterov, off", "train.global_batch": "128", "rate_factor": "2.0"}
"""One choice of Katib."""


@pytest.fixture
def cluster_with_katib(cluster: FakeCluster) -> FakeCluster:
    cluster.kinds["kubeflow.org/v1beta1"] = {"experiments"}
    return cluster


def write(tmp_path: Path, *options: str) -> tuple[int, Path]:
    document, output = tmp_path / "tried.yaml", tmp_path / "experiment.yaml"
    document.write_text(STUDY)
    return main(["study", str(document), "--backend", "katib", "-o", str(output), *options]), output


def experiment(tmp_path: Path, *options: str) -> Any:
    code, output = write(tmp_path, *options)
    assert code == ExitCode.DONE
    return yaml.safe_load(output.read_text())


def substitute(template: dict[str, Any], choice: dict[str, str]) -> dict[str, Any]:
    """Replace parameters in the JSON text of a Job, as Katib does."""
    text = json.dumps(template["trialSpec"])
    for parameter in template["trialParameters"]:
        text = text.replace(f"${{trialParameters.{parameter['name']}}}", choice[parameter["reference"]])
    assert not re.search(r"\$\{trial", text)
    job: dict[str, Any] = json.loads(text)
    return job


def test_a_grid_is_searched_completely(cluster_with_katib: FakeCluster, tmp_path: Path) -> None:
    spec = experiment(tmp_path, "--parallel", "5")["spec"]
    spaces = {one["name"]: (one["parameterType"], one["feasibleSpace"]) for one in spec["parameters"]}
    assert spaces == {
        "variant": ("categorical", {"list": ["as it is", "nesterov, off"]}),
        "train.global_batch": ("discrete", {"list": ["64", "128"]}),
        "rate_factor": ("discrete", {"list": ["0.5", "1.0", "2.0"]}),
    }
    assert spec["algorithm"] == {"algorithmName": "grid"}
    assert (spec["parallelTrialCount"], spec["maxTrialCount"]) == (5, 12)
    assert (spec["objective"]["type"], spec["objective"]["objectiveMetricName"]) == ("maximize", "top1")


def test_other_algorithms_choose_the_rate_from_a_range(cluster_with_katib: FakeCluster, tmp_path: Path) -> None:
    spec = experiment(tmp_path, "--algorithm", "tpe", "--trials", "4")["spec"]
    (rate,) = [one for one in spec["parameters"] if one["name"] == "rate_factor"]
    space = rate["feasibleSpace"]
    assert (rate["parameterType"], space["min"], space["max"]) == ("double", "0.5", "2.0")
    assert (spec["parallelTrialCount"], spec["maxTrialCount"], spec["maxFailedTrialCount"]) == (4, 4, 3)


def test_a_trial_gets_the_choice_and_trains_in_its_pod(cluster_with_katib: FakeCluster, tmp_path: Path) -> None:
    template = experiment(tmp_path)["spec"]["trialTemplate"]
    job = substitute(template, PARAMETERS)
    assert "metadata" not in job, "Katib names it"
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["name"] == template["primaryContainerName"]
    assert container["command"][-1] == "podscale.study.experiment_trial"
    assert {"name": "workspace", "persistentVolumeClaim": {"claimName": "volume"}} in pod["spec"]["volumes"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert "PODSCALE_RUN_DOCUMENT" not in environment
    choice = parse_choice(environment["PODSCALE_TRIAL"])
    assert choice == PARAMETERS
    document = StudyDocument.model_validate_json(environment["PODSCALE_STUDY"])
    trials = TrialGrid(narrow_study(document, choice)).due_trials(lambda key: None)
    assert [(trial.seed, trial.rate, trial.config.train.global_batch) for trial in trials] == [
        (1, 0.2, 128),
        (2, 0.2, 128),
    ]


def test_a_cluster_without_katib_is_refused(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = write(tmp_path)
    assert_error(code, capsys.readouterr().err, "Katib", "--backend kfp", field="--backend")
    assert not output.exists()


def test_a_run_of_several_pods_is_refused(
    cluster_with_katib: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = write(tmp_path, "--set", "launch.nodes=2")
    assert_error(code, capsys.readouterr().err, field="launch.backend")
