"""Training steps on paper: no waits, no slow copies, one device, one memory format, a budget of operators."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

BUDGET = json.loads(Path(__file__).with_name("operators.json").read_text(encoding="utf-8"))
"""Largest number of operators of a step, by case."""
TORUS = {"all_reduce": {"algorithm": "torus2d"}}
CASES: dict[str, dict[str, Any]] = {
    "lars": {"train": {"optimizer": {"name": "lars"}}},
    "mixed, averaged, fp32": {
        "ranks": 8,
        "train": {"precision": "fp32", "mix": {"mixup": 0.2, "cutmix": 1.0}, "ema": {"decay": 0.99}},
    },
    "torus2d, sharded, fp16, accumulated": {
        "ranks": 8,
        "train": {**TORUS, "weight_update": "sharded", "precision": "fp16", "accumulation": 2},
    },
    "group of 4, hierarchical, bf16-pure, lamb": {
        "ranks": 8,
        "model": {"batch_norm": {"group": 4}},
        "train": {
            "all_reduce": {"algorithm": "hierarchical"},
            "precision": "bf16-pure",
            "optimizer": {"name": "lamb"},
            "schedule": {"learning_rate": 0.01},
        },
    },
}
"""Representative cases of `make test`."""
PRECISIONS = ("fp32", "bf16", "fp16", "bf16-pure")
ALGORITHMS = ("flat", "ring", "tree", "hierarchical", "hybrid", "torus2d")
SHARDABLE = ("flat", "ring", "torus2d")
OPTIMIZERS = ("sgd", "lars", "lamb", "adam", "rmsprop", "shampoo", "nlcg", "neumann")


def assert_clean(report: dict[str, Any]) -> None:
    assert report["error"] == ""
    for finding in ("host_waits", "copies", "mixed", "races", "not_channels_last", "first_used_in_capture"):
        assert not report[finding], f"{finding}: {report[finding]}"


@pytest.mark.parametrize("name", CASES)
def test_a_step_keeps_the_device_busy(session: Any, name: str) -> None:
    report = session.run(**CASES[name])
    assert_clean(report)
    assert 0.9 * BUDGET[name] < report["operators"] <= BUDGET[name], report["counts"]


@pytest.mark.parametrize(
    ("mutant", "finding", "line"),
    [
        ("unpinned_copy", "copies", "device_prefetcher.py"),
        ("unpinned_draw", "copies", "device_prefetcher.py"),
        ("host_asks", "host_waits", "train_step.py"),
        ("host_scalar", "mixed", "train_step.py"),
        ("contiguous", "not_channels_last", ""),
        ("late_communicator", "first_used_in_capture", ""),
    ],
)
def test_a_planted_fault_is_found(session: Any, mutant: str, finding: str, line: str) -> None:
    report = session.run(mutant=mutant, ranks=8, train={"mix": {"mixup": 0.2}})
    assert report[finding]
    assert all(line in text for text in report[finding])
    if finding != "mixed":  # torch itself refuses that step
        assert_clean({**report, finding: []})


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("algorithm", "update"), [*product(ALGORITHMS, ["replicated"]), *product(SHARDABLE, ["sharded"])]
)
def test_every_all_reduce_and_precision(session: Any, algorithm: str, update: str, precision: str) -> None:
    train = {"all_reduce": {"algorithm": algorithm}, "weight_update": update, "precision": precision}
    assert_clean(session.run(ranks=8, train=train))


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(session: Any, optimizer: str, ranks: int) -> None:
    options = {"neumann": {"sgd_epochs": 1.0, "reset_epochs": 1.0}} if optimizer == "neumann" else {}
    train = {"optimizer": {"name": optimizer, **options}, "schedule": {"learning_rate": 0.01}}
    assert_clean(session.run(ranks=ranks, train=train))


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize(
    "case",
    [
        {"model": {"batch_norm": {"group": 2}}},
        {"model": {"batch_norm": {"group": 8}}, "train": {"accumulation": 2, "precision": "fp16"}},
        {"model": {"batch_norm": {"span": 4}}},
        {"train": {"stem_compute": "padded4"}, "model": {"stem": "imagenet"}, "image_size": 64},
        {"train": {"stem_compute": "space_to_depth"}, "model": {"stem": "imagenet"}, "image_size": 64},
        {"train": {"loss": "binary_cross_entropy", "label_smoothing": 0.0, "mix": {"mixup": 0.1, "cutmix": 1.0}}},
        {"train": {**TORUS, "weight_update": "sharded", "weight_gather": "bf16", "ema": {"decay": 0.9}}},
        {"train": {"all_reduce": {"algorithm": "torus2d", "shard_over": "world"}, "weight_update": "sharded"}},
        {"train": {"all_reduce": {"algorithm": "torus2d", "wire_row": "bf16", "wire_column": "fp16"}}},
        {"train": {"all_reduce": {"algorithm": "flat", "overlap": False}}},
        {"train": {"channels_last": False}},
        {"model": {"name": "alexnet", "width": 8, "stem": "imagenet"}, "image_size": 224},
        {"model": {"name": "resnet50", "stem": "imagenet", "width": 64}, "image_size": 224},
    ],
    ids=lambda case: str(case)[:60],
)
def test_other_options(session: Any, case: dict[str, Any]) -> None:
    assert_clean(session.run(ranks=8, **case))
