"""Parts of a prediction by the commands of a job's pods: killed, run again, and joined in the file of one process."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podscale.cli import main
from podscale.config import loads
from podscale.kubernetes.job_spec import JobSpec
from podscale.kubernetes.predict_job import PredictionJob, build_predict_spec
from podscale.prediction.merge_parts import merge_parts
from tests.support.prediction import DOCUMENT, odd_images, photograph, write_model_run, write_photographs, write_tar
from tests.support.refusals import refused

pytestmark = pytest.mark.slow
PARTS = 4


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a folder of photographs and broken images, and a tar."""
    folder = tmp_path_factory.mktemp("parts")
    write_model_run(folder)
    write_photographs(folder / "photos", 40)
    for name, (content, _, _) in odd_images().items():
        (folder / "photos" / name).write_bytes(content)
    write_tar(folder / "more.tar", {f"{n}.jpg": photograph(n) for n in range(30)})
    return folder


STOPPED = """
import os, runpy, sys, time
replace = os.replace
def wait(source, target):
    if os.path.basename(source).startswith(".part-"):
        time.sleep(600)
    replace(source, target)
os.replace = wait
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Program that runs a module, and stops where a part takes its name."""


@pytest.fixture(scope="module")
def job(workspace: Path) -> JobSpec:
    """Job of the prediction, whose volume is the workspace."""
    changes = [f"run.workspace={workspace}", "launch.cluster.workspace_claim=claim"]
    images = [str(workspace / "photos"), str(workspace / "more.tar")]
    return build_predict_spec(loads(DOCUMENT, "test", changes), PredictionJob(images=images, parts=PARTS, batch=8))


def pod_command(job: JobSpec, index: int) -> list[str]:
    """Return the command of a pod, with the variable that Kubernetes replaces."""
    words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in job.command]
    return [sys.executable, "-m", *words]


@pytest.fixture(scope="module")
def parts(workspace: Path, job: JobSpec) -> Path:
    """Folder of all parts, by the commands of the job's pods; the second was killed, and ran again."""
    folder = Path(job.command[job.command.index("--out") + 1])
    rows = folder.with_suffix(".jsonl")
    for index in (0, 2, 3):
        subprocess.run(pod_command(job, index), check=True)
    interpreter, _, *words = pod_command(job, 1)
    with subprocess.Popen([interpreter, "-c", STOPPED, *words]) as process:
        deadline = time.monotonic() + 120
        while not list(folder.glob(f".part-00001-of-{PARTS:05d}.*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not [*folder.glob("part-00001*"), *folder.parent.glob("*.jsonl")]
    assert list(folder.glob(".part-00001*")), "kill -9 leaves the temporary file"
    with refused(f"1 of {PARTS}", field=folder, got=f"part-00001-of-{PARTS:05d}"):
        merge_parts(folder, rows)
    assert not rows.exists()
    subprocess.run(pod_command(job, 1), check=True)
    assert not list(folder.glob(".*"))
    return folder


def test_the_last_pod_joins_the_rows_which_are_to_the_bit_those_of_one_process(workspace: Path, parts: Path) -> None:
    images = [str(workspace / "photos"), str(workspace / "more.tar")]
    command = [sys.executable, "-m", "podscale", "predict", "runs/small", *images, "--batch", "8", "--out", "one.jsonl"]
    assert subprocess.run(command, cwd=workspace, check=False).returncode == 1  # the broken images have no prediction
    rows = parts.with_suffix(".jsonl").read_bytes()
    assert rows == (workspace / "one.jsonl").read_bytes()
    names = [json.loads(line)["image"] for line in rows.splitlines()]
    listed = [str(path) for path in (workspace / "photos").rglob("*.*")]
    assert sorted(names) == sorted([*listed, *(f"{workspace}/more.tar!{n}.jpg" for n in range(30))])


def test_the_command_joins_the_same_rows_and_counts_them(
    workspace: Path, parts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge-predictions", str(parts), "--out", str(workspace / "merged.jsonl")]) == 1
    assert (workspace / "merged.jsonl").read_bytes() == parts.with_suffix(".jsonl").read_bytes()
    printed = capsys.readouterr().err
    assert "83 images" in printed
    assert "2 corrupt, 1 empty, 1 not_an_image, 2 too_many_pixels" in printed


def test_a_finished_part_is_not_predicted_again(job: JobSpec, parts: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in parts.iterdir()}
    done = subprocess.run(pod_command(job, 3), capture_output=True, text=True, check=True)
    assert "part-00003-of-00004: 19 rows" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in parts.iterdir()} == before
