"""Choice of kernels for `train.fused_kernels: auto`: the same on every rank, stored, and kept by a resumed run."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from podscale.config import RunConfig
from podscale.pytorch import kernel_choice
from podscale.pytorch.kernel_choice import fastest_kernels, resolve_fused_kernels, time_kernels
from podscale.pytorch.stored_choice import StoredChoice
from podscale.pytorch.world import World
from tests.distributed.conftest import RunWorld
from tests.support.triton_kernels import kernel_failure


def document(**train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "input": {"image_size": 16},
            "model": {"name": "resnet18", "stem": "small", "width": 8},
            "train": {"global_batch": 8, "fused_kernels": "auto", **train},
        }
    )


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"off": 1.0, "norm": 0.9, "gemm": 0.8}, "gemm"),
        ({"off": 1.0, "norm": 0.8, "gemm": 0.9}, "norm"),
        ({"off": 1.0, "norm": 0.99, "gemm": 0.985}, "off"),
        ({"off": 1.0, "norm": 0.9, "gemm": 0.89}, "norm"),
        ({"off": 1.0}, "off"),
        ({"norm": 1.0}, "norm"),
        ({}, "off"),
    ],
)
def test_our_kernels_must_be_faster_by_more_than_noise(seconds: dict[Any, float], chosen: str) -> None:
    assert fastest_kernels(seconds) == chosen


def test_every_rank_takes_the_choice_by_the_slowest_and_keeps_it(run_world: RunWorld, tmp_path: Path) -> None:
    choice_file = tmp_path / "run" / "fused_kernels.json"

    def body(world: World) -> Any:
        from podscale.pytorch import kernel_choice

        times = {"off": 1.0, "norm": 0.5 + 0.2 * world.rank, "gemm": [0.4, math.inf][world.rank]}
        timed = []

        def time_kernels(config: RunConfig, world: World, classes: int, kind: Any) -> float:
            timed.append(kind)
            return times[kind]

        with patch.object(kernel_choice, "time_kernels", time_kernels):
            choices = [
                kernel_choice.choose_kernels(config, world, 10, StoredChoice(choice_file))
                for config in (document(), document(), document(global_batch=16))
            ]
        return choices, timed

    for choices, timed in run_world(2, body):
        want = {"off": 1.0, "norm": 0.7}
        assert choices == [("norm", want, False), ("norm", want, True), ("norm", want, False)]
        assert timed == 2 * ["off", "norm", "gemm"], "the second choice is read, the third is of another batch"
    assert json.loads(choice_file.read_text())["chosen"] == "norm"


def test_only_rank_0_is_fenced_and_reads_the_file(run_world: RunWorld, tmp_path: Path) -> None:
    choice_file = tmp_path / "x.json"

    def body(world: World) -> Any:
        fenced: list[bool] = []
        stored = StoredChoice(choice_file, fence=lambda: fenced.append(choice_file.exists()))
        answers = [stored.keep(world, ["key"], lambda: {"rank": world.rank}) for _ in range(2)]
        return answers, fenced

    answers = 2 * [[({"key": ["key"], "rank": 0}, False), ({"key": ["key"], "rank": 0}, True)]]
    assert run_world(2, body) == [*zip(answers, ([False, True], []), strict=True)]


def test_nothing_is_timed_where_the_kernels_do_not_run(run_world: RunWorld, tmp_path: Path) -> None:
    stored = StoredChoice(tmp_path / "x.json", report=_no_report)

    def body(world: World) -> list[str]:
        with patch.object(kernel_choice, "time_kernels", None):
            return [
                resolve_fused_kernels(config, world, 10, stored).train.fused_kernels
                for config in (document(), document(fused_kernels="norm"), document(fused_kernels="off"))
            ]

    assert run_world(1, body) == [["off", "norm", "off"]]
    assert not (tmp_path / "x.json").exists()


def _no_report(*facts: Any, **kept: Any) -> None:
    raise AssertionError("there was no choice")


@pytest.mark.parametrize("change", [{"channels_last": False}, {"compile": "default"}])
def test_a_gpu_that_does_not_run_them_has_no_choice_either(change: dict[str, Any], tmp_path: Path) -> None:
    import torch

    world = World(0, 1, 0, 1, torch.device("cuda", 0))
    stored = StoredChoice(tmp_path / "x.json", report=_no_report)
    found = resolve_fused_kernels(document(**change), world, 10, stored)
    assert found.train.fused_kernels == "off"


def test_a_choice_on_a_gpu_replaces_the_option_and_is_reported(tmp_path: Path) -> None:
    import torch

    world, reports = World(0, 1, 0, 1, torch.device("cuda", 0)), []
    stored = StoredChoice(tmp_path / "x.json", report=lambda facts, *, kept: reports.append((facts, kept)))
    with patch.object(kernel_choice, "choose_kernels", lambda *_: ("gemm", {"off": 0.0123, "gemm": 0.01}, True)):
        found = resolve_fused_kernels(document(), world, 10, stored)
    assert found.train.fused_kernels == "gemm"
    assert reports == [({"kernels": "gemm", "off_ms": "12.3", "gemm_ms": "10"}, True)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp16"])
def test_a_pass_is_timed_in_each_precision(run_world: RunWorld, precision: str) -> None:
    def body(world: World) -> list[float]:
        with patch.object(kernel_choice, "REPEATS", 2), patch.object(kernel_choice, "WARMUPS", 1):
            return [time_kernels(document(precision=precision), world, 10, kind) for kind in ("off", "norm", "gemm")]

    [(off, norm, gemm)] = run_world(1, body)
    assert 0 < off < 60
    assert norm == gemm == math.inf, "a CPU does not run them"


def test_a_pass_that_needs_too_much_memory_has_no_time(run_world: RunWorld) -> None:
    """Of the device, or of a multiprocessor."""

    def body(world: World) -> list[float]:
        import torch

        failures = [torch.OutOfMemoryError(), kernel_failure("too little shared memory")]
        with patch.object(kernel_choice, "build_model_on_device", side_effect=failures):
            return [time_kernels(document(), world, 10, "off") for _ in failures]

    assert run_world(1, body) == [[math.inf, math.inf]]
