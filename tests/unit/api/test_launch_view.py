"""Lines of a launch on a terminal: every stage has a heading before its result, however short it was."""

from pathlib import Path
from typing import Any

import pytest

import podscale
from podscale.api.launch_view import LaunchView
from podscale.pipelines.local_runner import LocalLaunch
from podscale.runs import StageOutcome


@pytest.fixture
def launch(tmp_path: Path) -> LocalLaunch:
    config = podscale.load("digits", run={"workspace": tmp_path}, export={"formats": ["onnx"]})
    other: Any = None  # lease and runner, which the view does not read
    return LocalLaunch(config, other, tmp_path, other)


def end(launch: LocalLaunch, *stages: str, **values: Any) -> None:
    launch.outcomes |= {stage: StageOutcome(stage, 0, **values) for stage in stages}


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.strip() for line in capsys.readouterr().err.splitlines() if line.strip()]


def test_a_stage_that_ends_between_two_looks_has_its_heading(
    launch: LocalLaunch, capsys: pytest.CaptureFixture[str]
) -> None:
    view = LaunchView(launch.config, steps=False)
    view.update(launch)
    launch.stage = "shard"
    view.update(launch)
    assert lines(capsys) == ["[1/5] shard"]
    end(launch, "shard", "train", seconds=1.0)
    launch.stage = "evaluate"
    view.update(launch)
    view.update(launch)
    assert lines(capsys) == ["shard: 1.0 s", "[2/5] train", "train: 1.0 s", "[3/5] evaluate"]
    end(launch, "evaluate", "report", "export", reused=True)
    view.update(launch)
    reused = "finished before, nothing to do"
    assert lines(capsys) == [
        *(f"evaluate: {reused}", "[4/5] report", f"report: {reused}", "[5/5] export", f"export: {reused}"),
    ]


def test_a_stage_that_failed_has_no_result(launch: LocalLaunch, capsys: pytest.CaptureFixture[str]) -> None:
    view = LaunchView(launch.config, steps=False)
    launch.stage = "shard"
    launch.outcomes["shard"] = StageOutcome("shard", 1, "no images")
    view.update(launch)
    assert lines(capsys) == ["[1/5] shard"]
