"""Images, classes and problems of a run that are known before its stages."""

from pathlib import Path

import numpy as np
import pytest

from podscale.config import RunConfig, loads
from podscale.runs import RunDirectory
from podscale.runs.checkpoint import CheckpointStore, Retention, RunIdentity, Snapshot
from podscale.stages.known_data import known_data, start_problems

IDENTITY = RunIdentity({}, "c" * 64, "f" * 16)
SMALL_STEP = "model: {name: resnet18}\ninput: {image_size: 32}\ntrain: {global_batch: 8}\n"
"""A step that fits the memory of every machine."""


@pytest.mark.parametrize(
    ("data", "classes"),
    [
        ("{source: digits}", 10),
        ("{source: digits, only_classes: ['3', '8']}", 2),
        ("{source: photos, only_classes: [a, b, c]}", 3),
        ("{source: photos, classes: [a, b]}", 2),
        ("{source: photos}", None),
    ],
)
def test_classes_are_known_from_the_document(tmp_path: Path, data: str, classes: int | None) -> None:
    config = loads(f"run: {{workspace: {tmp_path}}}\ndata: {data}\n")
    assert known_data(config) == ({}, classes)


def missing_files(config: RunConfig, *, fresh: bool = False) -> list[object]:
    problems = start_problems(config, "here", fresh=fresh)
    return [problem.got for problem in problems if problem.field == "train.start_from.weights"]


def test_a_missing_file_of_weights_is_a_problem_before_the_first_checkpoint_only(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    config = loads(f"run: {{id: a, workspace: {tmp_path}}}\ntrain: {{start_from: {weights}}}\n")
    assert missing_files(config) == [str(weights)]
    weights.touch()
    assert missing_files(config) == []
    weights.unlink()
    store = CheckpointStore(RunDirectory.for_config(config).checkpoints, IDENTITY, Retention(1, 0), asynchronous=False)
    store.save(Snapshot(1, {"model/a": np.zeros(1, np.float32)}, {}))
    store.close()
    assert missing_files(config) == []
    assert missing_files(config, fresh=True) == [str(weights)]
    assert missing_files(loads("train: {start_from: 'timm:convnext_atto.d2_in1k'}\n"), fresh=True) == []


def test_the_runtime_of_a_page_is_needed_here_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    config = loads(f"run: {{workspace: {tmp_path}}}\nexport: {{formats: [html]}}\n{SMALL_STEP}")
    assert [problem.field for problem in start_problems(config, "here", fresh=False)] == ["export.formats"]
    assert list(start_problems(config, "containers", fresh=False)) == []
