"""mlperf.log, checked by MLPerf's own compliance checker."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from podscale.config import RunConfig, loads
from podscale.telemetry.mlperf_log import MlperfLog, hyperparameters
from tests.support.refusals import refused

compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")

LARS = {"recipe": "mlperf-lars", "global_batch": 3264}
SGD = {
    "global_batch": 2048,
    "optimizer": {"name": "sgd", "weight_decay": 5e-5},
    "schedule": {"name": "polynomial", "learning_rate": 0.8, "warmup_epochs": 5, "end_learning_rate": 1e-4},
}


def document(train: dict[str, Any], *, offset: float = 0.0, **telemetry: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "train": {**train, "target_top1": 0.759},
            "telemetry": {"mlperf_log": True, "mlperf_division": "closed", **telemetry},
            "evaluate": {"every_epochs": 4, "offset": offset},
        }
    )


def write(path: Path, config: RunConfig, accuracies: list[float], *, resumed: bool = False) -> None:
    """Write the log of a run of ImageNet's size with an evaluation every four epochs, from `evaluate.offset` on."""
    steps_per_epoch = 1_281_167 / config.train.global_batch
    log, offset = MlperfLog(path, config), config.evaluate.offset
    log.run_start(
        resumed=resumed, step=0, ranks=8, device="NVIDIA H100", train_images=1_281_167, validation_images=50_000
    )
    for number, top1 in enumerate(accuracies, start=1):
        step = round((4 * number - (4 - offset if offset else 0)) * steps_per_epoch)
        log.evaluation_started(step)
        log.evaluated(step, top1, target_reached=top1 >= 0.759)
    log.close()


def complaints(path: Path, ruleset: str, caplog: pytest.LogCaptureFixture) -> str:
    """Return the checker's complaints about a log; empty if it complies."""
    checker = compliance.make_checker("training", ruleset, quiet=False, werror=True)
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        good, *_ = compliance.main(str(path), f"training_{ruleset}/common.yaml", checker)
    assert good == (not caplog.text), caplog.text
    return caplog.text


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("ruleset", ["3.1.0", "4.0.0"])
@pytest.mark.parametrize("train", [LARS, SGD], ids=["lars", "sgd"])
@pytest.mark.parametrize("division", ["closed", "open"])
def test_a_run_that_reaches_the_target_complies(tmp_path, caplog, ruleset, train, division) -> None:
    write(tmp_path / "log", document(train, mlperf_division=division), [0.2, 0.74, 0.7601])
    assert complaints(tmp_path / "log", ruleset, caplog) == ""


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"optimizer": {"weight_decay": 3e-5}}, "lars_opt_weight_decay"),
        ({"optimizer": {"eps": 1e-5}}, "lars_epsilon"),
        ({"schedule": {"end_learning_rate": 0.0}}, "lars_opt_end_learning_rate"),
        ({"schedule": {"power": 1.0}}, "lars_opt_learning_rate_decay_poly_power"),
        ({"schedule": {"name": "cosine"}}, "lars_opt_learning_rate_decay_steps"),
    ],
)
def test_what_the_closed_division_forbids_is_seen(tmp_path, caplog, change, word) -> None:
    """The log has what was done, even against the rules; the checker finds each breach."""
    write(tmp_path / "log", document({**LARS, **change}), [0.7601])
    assert word in complaints(tmp_path / "log", "4.0.0", caplog)


def test_a_run_below_the_target_or_resumed_does_not_comply(tmp_path, caplog) -> None:
    config = document(LARS)
    write(tmp_path / "short", config, [0.7, 0.75])
    assert "eval_accuracy" in complaints(tmp_path / "short", "4.0.0", caplog)
    assert lines(tmp_path / "short")[-1]["metadata"] == {"status": "aborted"}
    write(tmp_path / "twice", config, [0.3])
    write(tmp_path / "twice", config, [0.7601], resumed=True)
    assert "run_start" in complaints(tmp_path / "twice", "4.0.0", caplog)
    write(tmp_path / "twice", config, [0.7601])
    assert complaints(tmp_path / "twice", "4.0.0", caplog) == "", "a new run begins a new log"


def test_the_lines_say_what_happened_and_when(tmp_path) -> None:
    write(tmp_path / "log", document(LARS), [0.2, 0.7601])
    logged = lines(tmp_path / "log")
    keys = [line["key"] for line in logged]
    begin = keys.index("init_stop")
    assert set(keys[:begin]) >= {"init_start", "train_samples", "eval_samples", "model_bn_span", "seed"}
    assert keys[begin:] == [
        "init_stop",
        "run_start",
        *("block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"),
        *("block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"),
        "run_stop",
    ]
    times = [line["time_ms"] for line in logged]
    assert times == sorted(times)
    assert logged[-1]["metadata"] == {"status": "success"}
    accuracy = [line for line in logged if line["key"] == "eval_accuracy"][-1]
    assert accuracy["value"] == 0.7601
    assert accuracy["metadata"] == {"epoch_num": 8.0, "samples_count": 3140 * 3264}
    blocks = [line["metadata"]["first_epoch_num"] for line in logged if line["key"] == "block_start"]
    assert blocks == [0.0, 4.0]


def test_blocks_follow_the_offset_of_the_evaluation(tmp_path, caplog) -> None:
    write(tmp_path / "log", document(LARS, offset=1), [0.2, 0.5, 0.7601])
    assert complaints(tmp_path / "log", "4.0.0", caplog) == ""
    blocks = [line["metadata"] for line in lines(tmp_path / "log") if line["key"] == "block_start"]
    spans = [(block["first_epoch_num"], block["epoch_count"]) for block in blocks]
    assert spans == [(0.0, 1.0), (1.0, 4.0), (5.0, 4.0)]


def test_hyper_parameters_have_the_names_and_values_of_the_rules() -> None:
    from mlperf_logging.mllog import constants

    known = {value for name, value in vars(constants).items() if name.isupper()}
    lars = dict(hyperparameters(document(LARS), 1_281_167 / 3264, ranks=8))
    assert set(lars) <= known, "the rules name keys of SGD that the package's list lacks, so only these are compared"
    assert lars["lars_opt_base_learning_rate"] == 10.5
    assert lars["lars_opt_learning_rate_decay_steps"] == round(35 * 1_281_167 / 3264), "37 epochs less two of warm-up"
    assert (lars["model_bn_span"], lars["gradient_accumulation_steps"]) == (408, 1)
    by_ranks = loads("model: {batch_norm: {group: 2}}\ntrain: {global_batch: 4096}")
    assert dict(hyperparameters(by_ranks, 1.0, ranks=16))["model_bn_span"] == 512


def test_a_log_without_a_target_is_refused() -> None:
    with refused("train.target_top1", field="telemetry.mlperf_log"):
        loads("telemetry: {mlperf_log: true}")
