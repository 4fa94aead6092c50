"""Comparison of the ranks' GPUs over a real process group, with given GPUs: kinds, shared GPUs, MIG slices."""

import logging
from typing import Any
from unittest import mock

import pytest
import torch

from podscale.errors import InputError
from podscale.pytorch import gpu_checks
from podscale.pytorch.gpu_checks import GpuIdentity, check_one_rank_per_gpu
from podscale.pytorch.world import World

H100, H200, SLICE = "NVIDIA H100", "NVIDIA H200", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
Answer = tuple[list[str], str]


def compare(run_world: Any, gpus: list[tuple[str, int, str]], environ: dict[str, str]) -> list[Answer]:
    """Return each rank's warnings, and the field and text of its error; a GPU is host, bus and name."""

    def body(world: World) -> Answer:
        host, bus, name = gpus[world.rank]
        identity, warnings = GpuIdentity(host, (0, bus, 0), name), list[str]()
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
        gpu_checks.log.addHandler(handler)
        try:
            with mock.patch.object(gpu_checks, "gpu_identity", return_value=identity):
                check_one_rank_per_gpu(torch.device("cuda", 0), environ)
        except InputError as error:
            return warnings, f"{error.field}: {error}"
        return warnings, ""

    answers: list[Answer] = run_world(len(gpus), body)
    return answers


def test_rank_0_warns_of_different_gpus(run_world: Any) -> None:
    ((first,), error), *others = compare(run_world, [("a", 1, H100), ("a", 2, H100), ("b", 1, H200)], {})
    assert f"{H100}: ranks 0 and 1; {H200}: rank 2" in first
    assert [error, *(error for _, error in others)] == [""] * 3
    assert not any(warnings for warnings, _ in others)


def test_gpus_of_one_kind_are_no_news(run_world: Any) -> None:
    assert compare(run_world, [("a", 1, H100), ("a", 2, H100), ("b", 1, H100)], {}) == [([], "")] * 3


@pytest.mark.parametrize("name", [H100, SLICE])
def test_every_rank_is_refused_if_two_share_a_gpu(run_world: Any, name: str) -> None:
    """MIG slices of a GPU have its address on PCI, however they are named in CUDA_VISIBLE_DEVICES."""
    for _, error in compare(run_world, [("a", 1, name), ("a", 2, name), ("a", 2, name)], {}):
        assert error.startswith("launch.processes: ")
        assert "ranks 1 and 2 " in error


def test_benchmarks_on_one_gpu_share_it(run_world: Any) -> None:
    assert compare(run_world, [("a", 1, H100)] * 2, {"NCCL_HOSTID": "rank"}) == [([], "")] * 2
