"""Parts of a prediction by real processes: killed, run again, and merged into the file of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.prediction import odd_images, photograph, write_model_run, write_photographs, write_tar

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


def podscale(workspace: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "podscale", *arguments]
    return subprocess.run(command, cwd=workspace, capture_output=True, text=True, check=False)


def predict(workspace: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return podscale(workspace, "predict", "runs/small", "photos", "more.tar", "--batch", "8", *arguments)


@pytest.fixture(scope="module")
def parts(workspace: Path) -> Path:
    """Folder of all parts; the second was killed in the middle, and ran again."""
    folder = workspace / "parts"
    for index in (0, 2, 3):
        assert predict(workspace, "--part", f"{index}/{PARTS}", "--out", "parts").returncode == 0
    pipe = workspace / "photos" / "b" / "0020.jpg"  # the part waits for its bytes, so it is killed in the middle
    content = pipe.read_bytes()
    pipe.unlink()
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "podscale", "predict", "runs/small", "photos", "more.tar", "--batch", "8"]
    with subprocess.Popen([*command, "--part", f"1/{PARTS}", "--out", "parts"], cwd=workspace) as process:
        deadline = time.monotonic() + 120
        while not list(folder.glob(f".part-00001-of-{PARTS:05d}.*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not list(folder.glob("part-00001*"))
    pipe.unlink()
    pipe.write_bytes(content)
    missing = podscale(workspace, "merge-predictions", "parts", "--out", "rows.jsonl")
    assert missing.returncode == 2
    assert f"1 of {PARTS} parts are missing (got 'part-00001-of-{PARTS:05d}')" in missing.stderr
    assert not (workspace / "rows.jsonl").exists()
    again = predict(workspace, "--part", f"1/{PARTS}", "--out", "parts")
    assert again.returncode == 0, again.stderr
    return folder


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_merged_rows_are_those_of_one_process_to_the_bit(workspace: Path, parts: Path, suffix: str) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    merged = podscale(workspace, "merge-predictions", "parts", "--out", f"merged.{suffix}")
    single = predict(workspace, "--out", f"single.{suffix}")
    assert merged.returncode == single.returncode == 1, merged.stderr  # the broken images have no prediction
    assert (workspace / f"merged.{suffix}").read_bytes() == (workspace / f"single.{suffix}").read_bytes()
    assert "83 images of 4 parts\n" in merged.stderr
    assert "no prediction for 8 images: 2 corrupt, 1 empty, 1 not_an_image, 2 too_many_pixels" in merged.stderr


def test_every_image_has_exactly_one_row(workspace: Path, parts: Path) -> None:
    names = [json.loads(line)["image"] for path in sorted(parts.glob("*.jsonl")) for line in path.open()]
    listed = [str(path.relative_to(workspace)) for path in (workspace / "photos").rglob("*.*")]
    assert sorted(names) == sorted([*listed, *(f"more.tar!{n}.jpg" for n in range(30))])
    assert all(path.stat().st_size for path in parts.glob("*.jsonl"))


def test_a_finished_part_is_not_predicted_again(workspace: Path, parts: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in parts.iterdir()}
    done = predict(workspace, "--part", f"3/{PARTS}", "--out", "parts")
    assert done.returncode == 0
    assert "part-00003-of-00004: 19 rows of 83 images, predicted before" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in parts.iterdir()} == before
