"""The train and evaluate stages as real processes under the real supervisor: killed, stopped, started again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from podscale.config import RunConfig
from podscale.errors import ExitCode
from podscale.evaluate import predictions
from podscale.rundir import RunDirectory, read_outcomes
from podscale.telemetry.events import read_records, undisturbed

SUPERVISE = """
import sys
from podscale.config import RunConfig
from podscale.launch.supervisor import supervise
sys.exit(supervise(RunConfig.model_validate_json(sys.argv[1]), sys.argv[2], sys.argv[3]))
"""


def document(workspace: Path, **train: Any) -> RunConfig:
    """60 updates of two processes; a checkpoint every 7, so that a kill finds work to do again."""
    return RunConfig.model_validate(
        {
            "run": {"id": "tiny", "workspace": str(workspace)},
            "input": {"loader": "torchvision", "image_size": 16},
            "model": {"name": "resnet18", "stem": "small", "width": 4},
            "train": {"epochs": 20, "global_batch": 16, "schedule": {"warmup_epochs": 1}, **train},
            "evaluate": {"batch": 4, "every_epochs": 10},
            "checkpoint": {"every_steps": 7, "every_epochs": 0},
            "telemetry": {"log_every": 1, "log": "json"},
            "launch": {"processes": 2, "threads": 1, "grace_seconds": 30, "timeout_seconds": 60},
        }
    )


def start(config: RunConfig, stage: str, shards: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, config.model_dump_json(), stage, str(shards)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output, _ = process.communicate(timeout=180)
    return process.returncode, output


def wait_for_step(config: RunConfig, step: int, process: "subprocess.Popen[str]") -> None:
    """Returns when update `step` of this launch is in the log."""
    path = RunDirectory.of(config).metrics
    end = time.monotonic() + 120
    while not any(record["kind"] == "step" and record["step"] >= step for record in read_records(path)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "no progress"
        time.sleep(0.01)


def rank_pids(supervisor: int) -> list[int]:
    """The rank processes below a supervisor, by RANK."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            values = dict(variable.split(b"=", 1) for variable in variables if b"=" in variable)
            if values.get(b"PODSCALE_SUPERVISOR") == str(supervisor).encode() and b"LOCAL_RANK" in values:
                found[int(values[b"RANK"])] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


def final(config: RunConfig) -> dict[str, Any]:
    run = RunDirectory.of(config)
    losses = {line["step"]: line["loss"] for line in undisturbed(read_records(run.metrics)) if line["kind"] == "step"}
    return {**load_file(run.model / "model.safetensors"), "losses": np.array([losses[step] for step in range(1, 61)])}


@pytest.mark.slow
def test_killed_and_stopped_runs_end_as_the_undisturbed_one(make_shard_set: Any, tmp_path: Path) -> None:
    shards = make_shard_set()
    straight = document(tmp_path / "straight")
    code, output = finish(start(straight, "train", shards))
    assert code == ExitCode.DONE, output
    expected = final(straight)

    disturbed = document(tmp_path / "disturbed")
    killed = start(disturbed, "train", shards)
    wait_for_step(disturbed, 10, killed)
    os.kill(rank_pids(killed.pid)[1], signal.SIGKILL)
    code, output = finish(killed)
    assert code == ExitCode.PEER_LOST, output
    assert "rank 1" in read_outcomes(RunDirectory.of(disturbed).outcome)["train"].error

    stopped = start(disturbed, "train", shards)
    wait_for_step(disturbed, 25, stopped)
    stopped.send_signal(signal.SIGTERM)
    code, output = finish(stopped)
    assert code == ExitCode.PREEMPTED, output

    orphaned = start(disturbed, "train", shards)
    wait_for_step(disturbed, 40, orphaned)
    orphaned.kill()
    orphaned.wait()

    code, output = finish(start(disturbed, "train", shards))
    assert code == ExitCode.DONE, output
    found = final(disturbed)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not np.array_equal(found[name], expected[name])] == []

    code, output = finish(start(disturbed, "evaluate", shards))
    assert code == ExitCode.DONE, output
    run = RunDirectory.of(disturbed)
    answers = predictions.read(run.predictions)
    assert len(set(answers.keys.tolist())) == len(answers) == 20
    evaluation = json.loads((run.model / "model.json").read_text())["training"]["evaluation"]
    assert np.mean(answers.topk[:, 0] == answers.labels) == pytest.approx(evaluation["top1"])
    assert answers.losses.mean() == pytest.approx(evaluation["loss"], rel=1e-5)
