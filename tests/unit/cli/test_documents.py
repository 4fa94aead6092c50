"""`podscale render` through the command line."""

from pathlib import Path

import pytest
import yaml

from podscale.cli import main
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
