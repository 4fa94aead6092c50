"""Training steps on paper: no waits, no slow copies, one device, one memory format, ordered streams, few operators."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.paper_gpu.options import ALL_REDUCES, OPTIMIZERS, PRECISIONS, RING, SHARDED_TORUS, TORUS, option_id

BUDGET = json.loads(Path(__file__).with_name("operators.json").read_text(encoding="utf-8"))
"""Largest number of operators of a step, by case."""
CONVOLUTIONS = {
    "ranks": 8,
    "image_size": 64,
    "model": {"name": "resnet101", "stem": "imagenet", "batch_norm": {"group": 4}},
    "train": {"fused_kernels": "gemm", "optimizer": {"name": "lars"}},
}
CASES: dict[str, dict[str, Any]] = {
    "lars": {"train": {"optimizer": {"name": "lars"}}},
    "torus2d on one node": {"ranks": 8, "ranks_per_node": 8, "train": {"all_reduce": {"algorithm": "torus2d"}}},
    "mixed, averaged, fp32": {
        "ranks": 8,
        "train": {"precision": "fp32", "mix": {"mixup": 0.2, "cutmix": 1.0}, "ema": {"decay": 0.99}},
    },
    "torus2d, sharded, fp16, accumulated": {
        "ranks": 8,
        "train": {**SHARDED_TORUS, "precision": "fp16", "accumulation": 2},
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
    "fused batch norm": {
        "ranks": 8,
        "image_size": 64,
        "model": {"stem": "imagenet", "batch_norm": {"group": 4}},
        "train": {**SHARDED_TORUS, "fused_kernels": "norm", "optimizer": {"name": "lars"}},
    },
    "1x1 convolutions by tensor descriptors": {**CONVOLUTIONS, "descriptors": True},
}
"""Representative cases of `make test`."""


def assert_clean(report: dict[str, Any]) -> None:
    assert report["error"] == ""
    for problem in ("host_waits", "copies", "mixed", "races", "not_channels_last", "first_used_in_capture"):
        assert not report[problem], f"{problem}: {report[problem]}"


def assert_within_budget(report: dict[str, Any], name: str) -> None:
    assert_clean(report)
    assert 0.9 * BUDGET[name] < report["operators"] <= BUDGET[name], report["counts"]


@pytest.mark.parametrize("name", CASES)
def test_a_step_keeps_the_device_busy(session: Any, name: str) -> None:
    assert_within_budget(session.run(**CASES[name]), name)


@pytest.mark.usefixtures("whole_matrix")
def test_convolutions_without_descriptors_keep_the_device_busy(session: Any) -> None:
    """The same kernels and operators, with pointers."""
    assert_within_budget(session.run(**CONVOLUTIONS), "1x1 convolutions with batch norm")


def test_more_operators_exceed_the_budget(session: Any) -> None:
    assert session.run(**CASES["lars"], mutant="more_operators")["operators"] > BUDGET["lars"]


@pytest.mark.parametrize(
    ("mutant", "problem", "line"),
    [
        ("unpinned_copy", "copies", "device_prefetcher.py"),
        ("unpinned_draw", "copies", "device_prefetcher.py"),
        ("host_asks", "host_waits", "train_step.py"),
        ("host_scalar", "mixed", "train_step.py"),
        ("contiguous", "not_channels_last", ""),
        ("late_communicator", "first_used_in_capture", ""),
    ],
)
def test_a_planted_fault_is_found(session: Any, mutant: str, problem: str, line: str) -> None:
    report = session.run(mutant=mutant, ranks=8, train={"mix": {"mixup": 0.2}})
    assert report[problem]
    assert all(line in text for text in report[problem])
    if problem != "mixed":  # torch itself refuses that step
        assert_clean({**report, problem: []})


@pytest.mark.parametrize(
    ("mutant", "text"),
    [
        ("queue_does_not_wait", "reducer.py"),
        ("nobody_waits_for_queue", "c10d::allreduce_"),
        ("prefetcher_does_not_wait", "device_prefetcher.py"),
        ("prefetcher_records_nothing", "freed while in use"),
        ("status_does_not_wait", "step_sync.py"),
        ("status_records_nothing", "freed while in use"),
        ("status_read_early", "the host reads"),
        ("average_does_not_wait", "train_state.py"),
        ("evaluation_does_not_wait", "evaluator.py"),
        ("checkpoint_does_not_wait", "the host reads what aten::_to_copy writes at pytorch/train_state.py"),
    ],
)
def test_a_missing_wait_is_found(session: Any, mutant: str, text: str) -> None:
    """In a step, in the average of the weights, in an evaluation, and in the copy for a checkpoint."""
    report = session.run(mutant=mutant, ranks=8, train={"ema": {"decay": 0.99}})
    assert report["error"] == ""
    assert any(text in race for race in report["races"])


@pytest.mark.parametrize(
    ("all_reduce", "mutant", "text"),
    [
        (TORUS, "nobody_waits_for_queue", "c10d::allreduce_"),
        (RING, "nobody_waits_for_messages", "c10d::recv_"),
    ],
    ids=option_id,
)
def test_a_missing_wait_inside_an_all_reduce_is_found(
    session: Any, all_reduce: dict[str, Any], mutant: str, text: str
) -> None:
    """The columns of a torus have a queue of their own. A ring adds what it receives."""
    case = {"ranks": 8, "steps": 1, "train": all_reduce}
    clean = session.run(**case)
    assert clean["error"] == ""
    assert not clean["races"]
    assert any(text in race for race in session.run(**case, mutant=mutant)["races"])


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("all_reduce", ALL_REDUCES, ids=option_id)
def test_every_all_reduce_and_precision(session: Any, all_reduce: dict[str, Any], precision: str) -> None:
    assert_clean(session.run(ranks=8, train={**all_reduce, "precision": precision}))


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize("all_reduce", ALL_REDUCES, ids=option_id)
def test_every_all_reduce_on_one_node(session: Any, all_reduce: dict[str, Any]) -> None:
    assert_clean(session.run(ranks=8, ranks_per_node=8, train=all_reduce))


def optimizer_options(name: str, **train: Any) -> dict[str, Any]:
    options = {"neumann": {"sgd_epochs": 1.0, "reset_epochs": 1.0}} if name == "neumann" else {}
    return {"optimizer": {"name": name, **options}, "schedule": {"learning_rate": 0.01}, **train}


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "shampoo"])
def test_every_optimizer(session: Any, optimizer: str, ranks: int) -> None:
    assert_clean(session.run(ranks=ranks, train=optimizer_options(optimizer)))


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize(("roots", "ranks"), [("eigh", 1), ("eigh", 8), ("newton", 8)])
def test_shampoo_waits_only_for_eigenvalues(session: Any, roots: str, ranks: int) -> None:
    train = {"optimizer": {"name": "shampoo", "shampoo": {"roots": roots}}, "schedule": {"learning_rate": 0.01}}
    report = session.run(ranks=ranks, train=train)
    assert_clean({**report, "host_waits": []})
    waits = {wait.partition(" ")[0] for wait in report["host_waits"]}
    assert waits == ({"aten::_linalg_eigh"} if roots == "eigh" else set())


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name not in ("shampoo", "muon")])
def test_every_optimizer_with_a_sharded_update(session: Any, optimizer: str) -> None:
    assert_clean(session.run(ranks=8, train=optimizer_options(optimizer, **SHARDED_TORUS)))


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "options",
    [{"fused_kernels": "norm"}, {"fused_kernels": "gemm"}, {"accumulation": 2}, {"ema": {"decay": 0.9}}],
    ids=option_id,
)
def test_every_precision_with_other_options(session: Any, options: dict[str, Any], precision: str) -> None:
    case = {"image_size": 64, "model": {"name": "resnet50", "stem": "imagenet", "width": 16}}
    assert_clean(session.run(ranks=8, **case, train={**options, "precision": precision}))


GRAPHS: list[dict[str, Any]] = [
    {"train": {"optimizer": {"name": "lars"}}},
    {"ranks": 8, "train": {**SHARDED_TORUS, "precision": "fp16", "accumulation": 2}},
    {"ranks": 8, "model": {"batch_norm": {"group": 4}}, "train": {"all_reduce": {"algorithm": "hierarchical"}}},
    {"ranks": 8, "train": {"mix": {"mixup": 0.2, "cutmix": 1.0}, "ema": {"decay": 0.99}}},
    {**CONVOLUTIONS, "model": {"name": "resnet50", "stem": "imagenet", "width": 16}},
]
"""Steps in a CUDA graph: three ordinary steps, a recorded one, and its replays."""


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize("case", GRAPHS, ids=option_id)
def test_a_step_in_a_cuda_graph(session: Any, case: dict[str, Any]) -> None:
    report = session.run(**{**case, "train": {**case["train"], "cuda_graph": True}})
    assert_clean(report)
    assert report["counts"]["a graph's launch"] == 1
    assert report["operators"] < 40, report["counts"]  # copies of the batch, its launch, results, status


@pytest.mark.usefixtures("whole_matrix")
@pytest.mark.parametrize(
    ("mutant", "text"),
    [
        ("static_copy_does_not_wait", "a graph's launch"),
        ("results_not_copied", "a graph's launch"),
        ("warm_up_does_not_wait", "cuda_graph.py"),
        ("nobody_waits_for_queue", "a graph ends before its stream"),
    ],
)
def test_a_missing_wait_of_a_cuda_graph_is_found(session: Any, mutant: str, text: str) -> None:
    report = session.run(mutant=mutant, ranks=8, train={"cuda_graph": True})
    assert report["error"] == ""
    assert any(text in race for race in report["races"]), report["races"]


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
        {"train": {**SHARDED_TORUS, "weight_gather": "bf16", "ema": {"decay": 0.9}}},
        {"train": {"all_reduce": {"algorithm": "torus2d", "shard_over": "world"}, "weight_update": "sharded"}},
        {"train": {"all_reduce": {"algorithm": "torus2d", "wire_row": "bf16", "wire_column": "fp16"}}},
        {"train": {"all_reduce": {"algorithm": "torus2d", "wire_row": "int8", "wire_column": "int8"}}},
        {"train": {"all_reduce": {"algorithm": "ring", "wire_column": "int8"}}},
        {"train": {"all_reduce": {"algorithm": "hierarchical", "wire_row": "int8", "wire_column": "int8"}}},
        {"train": {"all_reduce": {"algorithm": "flat", "overlap": False}}},
        {"train": {"channels_last": False}},
        {"model": {"name": "alexnet", "width": 8, "stem": "imagenet"}, "image_size": 224},
        {"model": {"name": "resnet50", "stem": "imagenet", "width": 64}, "image_size": 224},
    ],
    ids=option_id,
)
def test_other_options(session: Any, case: dict[str, Any]) -> None:
    assert_clean(session.run(ranks=8, **case))
