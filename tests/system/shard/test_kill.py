"""Kill -9 of the packer at random moments: no partial file is visible, no process is left, the bytes are equal."""

import hashlib
import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from podscale.config.data import DataSection
from podscale.runs import dataset_directory
from tests.support.commands import alive

DATA = DataSection(source="images", shard_bytes=400_000, max_reject_rate=0.1)
DOCUMENT = "data: {source: images, shard_bytes: 400_000, max_reject_rate: 0.1}\nlaunch: {processes: 1}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of 160 images of 130 KB, two of them broken, and a document.

    Two processes pack a set of this size; this process packs smaller ones.
    """
    root = tmp_path_factory.mktemp("kill") / "images"
    noise = np.random.default_rng(0).integers(0, 256, (300, 320, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "JPEG", quality=93)
    for number in range(160):
        path = root / "ab"[number % 2] / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(out.getvalue() + b"%d" % number if number % 80 else b"broken")
    (root.parent / "run.yaml").write_text(DOCUMENT)
    return root.parent


def start(directory: Path, workspace: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "podscale", "shard", "run.yaml", "--workers", "2", "--set"]
    return subprocess.Popen([*command, f"run.workspace={workspace}"], cwd=directory, stdout=subprocess.DEVNULL)


def tree(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def packed(out: Path) -> int:
    return len(list(out.glob("*/shard-*.tar")))


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_killed_packers_leave_whole_shards_and_the_next_run_finishes(folder: Path) -> None:
    calm, out = (Path(dataset_directory(str(folder / name), DATA)) for name in ("calm", "killed"))
    assert start(folder, "calm").wait(120) == 0
    expected = tree(calm)
    rng = random.Random(5)
    before = 0
    for _ in range(3):
        process = start(folder, "killed")
        target = before + rng.randrange(1, 6)
        wait_until(lambda process=process, target=target: packed(out) >= target or process.poll() is not None)
        time.sleep(rng.random() * 0.03)
        workers = children(process.pid) if process.poll() is None else []
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda workers=workers: not any(map(alive, workers)), 20)
        visible = {name: digest for name, digest in tree(out).items() if not name.rpartition("/")[2].startswith(".")}
        assert visible.items() <= expected.items(), "a file under its final name differs from an undisturbed run's"
        assert "manifest.json" not in visible, "killed too late for the test: make the set larger"
        before = packed(out)
        assert before >= 1
    assert start(folder, "killed").wait(120) == 0
    assert tree(out) == expected
