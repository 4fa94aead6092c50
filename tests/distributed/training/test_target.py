"""Training to a target accuracy ends with the evaluation that reaches it, and MLPerf's checker accepts the log."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from podscale.config import RunConfig
from podscale.config.data import DataSection
from podscale.data.sharding.build_shard_set import build_shard_set
from podscale.pytorch.world import World
from podscale.runs import RunDirectory
from tests.distributed.training.test_training import records_of, run_training

TARGET = 0.8


def digits(workspace: Path, **train: Any) -> RunConfig:
    """Return a small network on digits, with a schedule of the closed division."""
    return RunConfig.model_validate(
        {
            "run": {"id": "target", "workspace": str(workspace), "seed": 3},
            "input": {"loader": "reference", "image_size": 8, "crop": {"scale": (0.9, 1), "flip": 0}},
            "model": {"name": "resnet18", "stem": "small", "width": 8},
            "train": {
                "epochs": 12,
                "global_batch": 64,
                "target_top1": TARGET,
                "optimizer": {"name": "lars", "weight_decay": 1e-4, "trust_coefficient": 0.01},
                "schedule": {"name": "polynomial", "learning_rate": 2, "warmup_epochs": 1, "end_learning_rate": 1e-4},
                **train,
            },
            "evaluate": {"batch": 64, "crop_fraction": 1.0},
            "telemetry": {"mlperf_log": True, "mlperf_division": "closed"},
            "launch": {"timeout_seconds": 60},
        }
    )


def test_a_run_ends_at_its_target_and_its_log_complies(run_world: Any, tmp_path: Path, caplog: Any) -> None:
    compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    shards = tmp_path / "shards"
    build_shard_set(DataSection(source="digits"), shards, workers=1)
    config = digits(tmp_path)
    results = run_world(2, lambda world: run_training(config, shards, world))
    run = RunDirectory.for_config(config)
    assert results[0] == results[1]
    assert results[0].evaluation["top1"] >= TARGET
    evaluations = [line for line in records_of(config) if line["kind"] == "evaluation"]
    assert all(line["top1"] < TARGET for line in evaluations[:-1]), "the first that reaches it is the last"
    assert results[0].steps == evaluations[-1]["step"] < 12 * 22
    reached = [line for line in records_of(config) if line.get("event") == "target_reached"]
    assert [(line["step"], line["top1"]) for line in reached] == [(results[0].steps, results[0].evaluation["top1"])]
    assert (run.model / "model.safetensors").exists()

    checker = compliance.make_checker("training", "4.0.0", quiet=False, werror=True)
    with caplog.at_level(logging.WARNING):
        good, *_ = compliance.main(str(run.mlperf), "training_4.0.0/common.yaml", checker)
    assert good, caplog.text
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in run.mlperf.read_text().splitlines()]
    assert lines[-1]["metadata"] == {"status": "success"}
    assert [line["value"] for line in lines if line["key"] == "train_samples"] == [1438]

    log = run.mlperf.read_bytes()
    again = run_world(2, lambda world: run_training(config, shards, world))
    assert again[0].steps == results[0].steps, "a run that reached its target does not train again"
    assert run.mlperf.read_bytes() == log, "and does not log a second time"


def test_a_run_that_misses_its_target_trains_to_the_end(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    config = digits(tmp_path, epochs=2, global_batch=16, target_top1=0.999)

    def body(world: World) -> Any:
        return run_training(config, make_directory, world)

    make_directory = make_shard_set()
    assert run_world(2, body)[0].steps == 6
    last = json.loads(RunDirectory.for_config(config).mlperf.read_text().splitlines()[-1].removeprefix(":::MLLOG "))
    assert (last["key"], last["metadata"]) == ("run_stop", {"status": "aborted"})
