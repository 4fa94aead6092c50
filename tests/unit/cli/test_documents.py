"""`podscale render` through the command line."""

import json
from pathlib import Path

import pytest
import yaml

from podscale.cli import main
from podscale.errors import ExitCode
from podscale.pipelines.presets import CHART_CLAIM, CHART_WORKSPACE
from tests.support.outcomes import assert_error

VOLUME = ["--set", "run.workspace=/workspace", "--set", "launch.cluster.workspace_claim=w"]


def kinds(text: str) -> list[str]:
    return [one["kind"] for one in yaml.safe_load_all(text)]


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "digits", *VOLUME]) == 0
    assert kinds(capsys.readouterr().out) == ["NetworkPolicy", "PyTorchJob"]
    assert main(["render", "digits", *VOLUME, "--set", "launch.backend=trainjob", "--stage", "all"]) == 0
    printed = kinds(capsys.readouterr().out)
    assert [kind for kind in printed if kind != "NetworkPolicy"] == ["Job", "TrainingRuntime", "TrainJob", "Job", "Job"]


def test_hardware_has_a_likely_kind_of_job(capsys: pytest.CaptureFixture[str]) -> None:
    tpu = ["--set", "launch.hardware=tpu-v5e-2x2", "--set", "launch.processes=1", "--set", "launch.backend=auto"]
    assert main(["render", "digits", *VOLUME, *tpu]) == 0
    printed = capsys.readouterr()
    assert kinds(printed.out)[-1] == "JobSet"
    (note,) = [line for line in printed.err.splitlines() if line.startswith("note: launch.hardware: ")]
    assert "tpu-v5e-2x2" in note
    counted = ["--set", "launch.resources.accelerator=google.com/tpu", "--set", "launch.resources.accelerators=4"]
    assert main(["render", "digits", *VOLUME, *counted, "--set", "launch.processes=1"]) == 0
    assert kinds(capsys.readouterr().out)[-1] == "JobSet"


ASSUMED_PATH, ASSUMED_CLAIM = "run.workspace=/workspace", "launch.cluster.workspace_claim=podscale-workspace"
THEIR_VOLUME = "launch.cluster.volumes=[{path: /workspace, claim: theirs}]"


@pytest.mark.parametrize(
    ("arguments", "assumed", "claims"),
    [
        (["digits", "--backend", "pytorchjob"], [ASSUMED_PATH, ASSUMED_CLAIM], {"podscale-workspace"}),
        (["mlperf-8xh100"], [ASSUMED_CLAIM], {"podscale-workspace"}),
        (["digits", "--set", "launch.cluster.workspace_claim=mine"], [ASSUMED_PATH], {"mine"}),
        (["digits", "--set", "run.workspace=/here"], [ASSUMED_CLAIM], {"podscale-workspace"}),
        (["digits", "--set", THEIR_VOLUME], [ASSUMED_PATH], {"theirs"}),
        (["digits", *VOLUME], [], {"w"}),
    ],
)
def test_the_charts_workspace_is_assumed(
    arguments: list[str], assumed: list[str], claims: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", *arguments]) == 0
    printed = capsys.readouterr().out
    comment = [line for line in printed.splitlines() if line.startswith("#")]
    settings = "".join(f" --set {setting}" for setting in assumed)
    assert comment[:1] == ([f"# Assumed (the chart's defaults):{settings}"] if assumed else [])
    job = list(yaml.safe_load_all(printed))[-1]
    (template,) = {json.dumps(spec["template"]) for spec in job["spec"]["pytorchReplicaSpecs"].values()}
    volumes = json.loads(template)["spec"]["volumes"]
    found = {v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v}
    assert found == claims


def test_the_assumed_workspace_is_the_charts() -> None:
    """manifests/overlays/cpu/defaults.yaml is what the chart writes by default."""
    chart = yaml.safe_load(Path("manifests/overlays/cpu/defaults.yaml").read_text(encoding="utf-8"))
    assert chart["run"]["workspace"] == CHART_WORKSPACE
    assert chart["launch"]["cluster"]["workspace_claim"] == CHART_CLAIM


def test_a_package_has_the_assumed_workspace_too(tmp_path: Path) -> None:
    assert main(["compile", "digits", "-o", str(tmp_path / "p.yaml")]) == 0
    package = (tmp_path / "p.yaml").read_text(encoding="utf-8")
    assert package.startswith(f"# Assumed (the chart's defaults): --set {ASSUMED_PATH} --set {ASSUMED_CLAIM}\n")
    _, platform = yaml.safe_load_all(package)
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert {e["pvcMount"][0]["constant"] for e in executors.values() if "pvcMount" in e} == {"podscale-workspace"}


@pytest.mark.parametrize("path", ["runs", "."])
def test_an_explicit_relative_path_is_refused(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["render", "digits", "--set", f"run.workspace={path}"])
    assert_error(code, capsys.readouterr().err, f"(got {path!r})", field="run.workspace")


def test_an_explicit_null_claim_is_no_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "digits", "--set", "launch.cluster.workspace_claim=null"]) == ExitCode.BAD_INPUT
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  - run.workspace: ")]
    assert "launch.cluster.workspace_claim" in line


def test_defaults_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    defaults, output = tmp_path / "defaults.yaml", tmp_path / "job.yaml"
    defaults.write_text("run: {workspace: /ws}\nlaunch: {cluster: {workspace_claim: theirs}}\n")
    assert main(["render", "digits", "--defaults", str(defaults), "-o", str(output)]) == 0
    assert capsys.readouterr().out == ""
    assert "claimName: theirs" in output.read_text()


@pytest.mark.parametrize(
    ("arguments", "field", "says"),
    [
        (["--stage", "trian"], "--stage", ["trian", "shard, train, evaluate, report, all"]),
        (["--backend", "local"], "--backend", ["local", "pytorchjob, jaxjob, trainjob, jobset, job"]),
        (["--defaults", "/no/such/file"], "/no/such/file", []),
        (["--output", "/no/such/folder/x"], "/no/such/folder/x", ["No such file or directory"]),
        (["--set", "launch.hardware=tpu-v5e-3x3"], "", ["launch.hardware", "tpu-v5e-3x3", "1x1, 2x2"]),
    ],
)
def test_bad_input(arguments: list[str], field: str, says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["render", "digits", *VOLUME, *arguments])
    printed = capsys.readouterr()
    assert_error(code, printed.err, *says, field=field)
    assert printed.out == ""
