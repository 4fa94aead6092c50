"""`podscale predict` beside the real evaluation of a run, in real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from podscale.data.shard_set import ShardSet
from podscale.evaluation.evaluation_json import read_evaluation, write_evaluation
from podscale.prediction.predict import predict
from podscale.prediction.predictor import PredictOptions
from podscale.runs import RunDirectory
from podscale.runs.predictions import read_predictions
from podscale.stages import local
from podscale.util.processes import parent_of
from tests.support.digits_run import DIGITS, write_digits_set
from tests.support.prediction import write_model_run, write_photographs
from tests.support.tiny import TINY

DOCUMENT = (
    TINY.replace("input:", "run: {id: small, seed: 3}\nlaunch: {processes: 1, threads: 1}\ninput:")
    + "evaluate: {flip: true, batch: 100}\n"
)


def test_validation_images_are_predicted_as_evaluated(tmp_path: Path) -> None:
    """The model is of random weights, so that the classes of many images are nearly equally probable."""
    shards = tmp_path / "shards"
    write_digits_set(shards)
    config = write_model_run(tmp_path, DOCUMENT, DIGITS)
    run = RunDirectory.for_config(config)
    local.evaluate(config, str(shards))
    evaluation, evaluated = read_evaluation(run.evaluation), read_predictions(run.predictions)
    split = ShardSet.open(shards).split("validation")

    rows = list(predict(run.path, [str(shards / "validation")]))
    assert sum(row.label == row.classes[0] for row in rows) / len(rows) == evaluation.scores.top1
    row_of_key = {int(key): number for number, key in enumerate(split.keys)}
    order = [row_of_key[int(key)] for key in evaluated.keys]
    classes = np.array([[DIGITS.index(name) for name in rows[number].classes] for number in order])
    np.testing.assert_array_equal(classes[:, 0], evaluated.topk[:, 0])
    assert evaluated.tempered_losses is not None
    np.testing.assert_allclose(evaluated.tempered_losses[:, 12], evaluated.losses, rtol=1e-5)  # factor 1

    calibration = evaluation.calibration.model_copy(update={"temperature": 2.5})  # random weights have no best one
    write_evaluation(run.evaluation, evaluation.model_copy(update={"calibration": calibration}))
    assert {row.temperature for row in predict(run.path, [str(shards / "validation")])} == {2.5}
    plain = list(predict(run.path, [str(shards / "validation")], PredictOptions(calibrate=False)))
    assert {row.temperature for row in plain} == {1.0}
    probabilities = np.array([plain[number].probabilities for number in order])
    np.testing.assert_allclose(probabilities, evaluated.confidences, rtol=1e-4)

    weights = run.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")  # not the evaluated weights any more
    assert {row.temperature for row in predict(run.path, [str(shards / "validation")])} == {1.0}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    config = write_model_run(tmp_path)
    write_photographs(tmp_path / "photos", 12)
    run = RunDirectory.for_config(config).path
    return [
        sys.executable,
        "-m",
        "podscale",
        "predict",
        str(run),
        *[str(tmp_path / "photos")] * 200,
        "--processes",
        "2",
    ]


def children_of(parent: int) -> list[int]:
    """Return the prediction's processes; spawning has a helper process too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and parent_of(int(entry.name)) == parent:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if any(b"spawn_main" in word for word in words):
                found.append(int(entry.name))
    return found


def start(command: list[str]) -> tuple["subprocess.Popen[str]", list[int]]:
    """Start a prediction; return it and its processes when its first rows have come."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())
    return process, children_of(process.pid)


def test_a_killed_process_ends_the_command(command: list[str]) -> None:
    process, workers = start(command)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "--processes" in errors


def test_no_process_outlives_the_command(command: list[str]) -> None:
    process, workers = start(command)
    process.kill()
    _, errors = process.communicate(timeout=120)
    assert "Traceback" not in errors
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{worker}/exe").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{worker}/exe").exists() for worker in workers)
