"""A timm model fine-tuned on photographs, killed and resumed, then asked for one picture in four ways."""

import json
import os
import signal
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.errors import ExitCode
from podscale.runs.checkpoint.format import complete_entries
from tests.support.commands import Command, different, podscale, result, set_options
from tests.support.demo_frame import demo_frame, page_browser_or_skip
from tests.support.serving import running_server

FIRST = ("n01440764", "n02102040", "n02979186")
SECOND = ("n03394916", "n03417042", "n03425413")
"""Classes of imagenette: of the weights to start from, and of the model."""
IMAGES = 60
"""Images of a class."""
ROUNDING = 1e-4
"""Tolerance of a probability; an export is checked against PyTorch to the same."""
COMMON = (
    "model.name=timm:convnext_atto",
    "input.image_size=64",
    "train.global_batch=16",
    "train.epochs=2",
    "train.schedule={name: cosine, learning_rate: 0.02, warmup_epochs: 0.5}",
    "evaluate.every_epochs=0",
    "telemetry.log_every=1",
    "launch={processes: 2, threads: 1}",
)
TUNED = ("data.source=second", "train.start_from=weights.safetensors", "checkpoint.every_steps=3", *COMMON)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        command.kill()


def run(folder: Path, *arguments: str) -> str:
    """Run a command that succeeds, and return what it printed."""
    ended = podscale(folder, *arguments)
    assert ended.code == 0, ended.err
    return ended.out


def train(folder: Path, *changes: str) -> None:
    """Run the first two stages; the later ones do not change the weights."""
    for stage in ("shard", "train"):
        run(folder, stage, "imagefolder", *set_options(*changes))


def write_folders(archive: Path, workspace: Path) -> None:
    """Write the first images of the classes to `first/` and `second/`, one folder for each class."""
    count: Counter[str] = Counter()
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if member.isfile() and parts[1] == "train" and parts[2] in FIRST + SECOND and count[parts[2]] < IMAGES:
                count[parts[2]] += 1
                path = workspace / ("first" if parts[2] in FIRST else "second") / parts[2] / parts[3]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(tar.extractfile(member).read())
    assert list(count.values()) == [IMAGES] * 6


def events(printed: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (printed / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("event") == kind]


def test_from_weights_to_one_class_everywhere(real_data: Path, tmp_path: Path, commands: list[Command]) -> None:
    program = page_browser_or_skip()
    write_folders(real_data / "imagenette224.tar", tmp_path)
    train(tmp_path, "run.id=first", "data.source=first", *COMMON)
    run(tmp_path, "export", "runs/first", "--format", "safetensors", "--out", "weights.safetensors")

    train(tmp_path, "run.id=calm", *TUNED)
    (weights,) = events(tmp_path / "runs" / "calm", "initial_weights")
    assert weights["head"] == "replaced", "the exported file lists other classes"
    tuned = tmp_path / "runs" / "tuned"
    options = ["run", "imagefolder", *set_options("run.id=tuned", *TUNED)]
    commands.append(Command(tmp_path, *options))
    commands[0].wait_for_steps(tuned, 4)
    os.kill(commands[0].ranks()[1], signal.SIGKILL)
    ended = commands[0].end()
    assert ended.code == ExitCode.PEER_LOST, ended.err
    assert complete_entries(tuned / "checkpoints"), "the kill came before the first checkpoint"
    (tmp_path / "weights.safetensors").rename(tmp_path / "moved")  # a resumed run does not read them again
    run(tmp_path, *options)
    assert len(events(tuned, "resumed")) == 1
    assert different(result(tuned), result(tmp_path / "runs" / "calm")) == []

    run(tmp_path, "export", "runs/tuned", "--preprocessing")
    run(tmp_path, "export", "runs/tuned", "--format", "html")
    picture = min((tmp_path / "second" / SECOND[0]).iterdir())
    predicted = json.loads(run(tmp_path, "predict", "runs/tuned", str(picture), "--top", "3"))
    of_file = json.loads(run(tmp_path, "predict", "runs/tuned/export/model.onnx", str(picture), "--top", "3"))
    with running_server(tuned, tmp_path) as server:
        url = f"http://127.0.0.1:{server.port}/predict?top=3"
        curl = ["curl", "--silent", "-H", "Content-Type: image/jpeg", "--data-binary", f"@{picture}", url]
        (served,) = json.loads(subprocess.check_output(curl))["predictions"]
    with demo_frame(program, tuned / "export" / "demo.html", tmp_path) as frame:
        (probabilities,), _ = frame.classify([picture.read_bytes()])
        names = frame.evaluate("data.classes")
        assert frame.requests() == []
    order = np.argsort(-probabilities)
    in_page = {"classes": [names[index] for index in order], "probabilities": probabilities[order].tolist()}
    assert sorted(predicted["classes"]) == sorted(SECOND)
    for other in (of_file, served, in_page):
        assert other["classes"] == predicted["classes"]
        np.testing.assert_allclose(other["probabilities"], predicted["probabilities"], atol=ROUNDING)
