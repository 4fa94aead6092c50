"""Device of a rank, and refusals of GPUs that cannot be used. `torch.cuda` is replaced by functions."""

import logging
from typing import Any

import pytest
import torch

from podscale.config import TrainSection
from podscale.pytorch import gpu_checks
from podscale.pytorch.gpu_checks import GpuIdentity, check_gpu, choose_device, compare_identities
from podscale.util import host_info
from tests.support.refusals import refused


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `gpus(count, name, capability)`, which makes torch report such GPUs."""

    def pretend(count: int, name: str = "NVIDIA H100", capability: tuple[int, int] = (9, 0)) -> None:
        replaced: dict[str, Any] = {
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "get_device_name": lambda device: name,
            "get_device_capability": lambda device: capability,
            "get_arch_list": lambda: ["sm_75", "sm_80", "sm_90", "compute_120a"],
        }
        for attribute, value in replaced.items():
            monkeypatch.setattr(torch.cuda, attribute, value)
        monkeypatch.setattr(torch.version, "cuda", "13.2")

    return pretend


RANKS = [{"LOCAL_RANK": str(rank)} for rank in range(4)]
"""Environments of the ranks of a node."""


def test_a_rank_takes_the_gpu_of_its_local_rank(gpus: Any) -> None:
    gpus(4)
    assert [choose_device(environ).index for environ in RANKS] == [0, 1, 2, 3]
    gpus(1)  # a launcher set CUDA_VISIBLE_DEVICES for each rank
    assert [choose_device(environ).index for environ in RANKS] == [0, 0, 0, 0]
    gpus(0)
    assert choose_device(RANKS[3]) == torch.device("cpu")


@pytest.mark.parametrize(("count", "messages"), [(4, 0), (1, 1)])
def test_one_rank_of_a_node_reports_that_ranks_see_fewer_gpus(
    gpus: Any, caplog: pytest.LogCaptureFixture, count: int, messages: int
) -> None:
    caplog.set_level(logging.INFO)
    gpus(count)
    for environ in RANKS:
        check_gpu(TrainSection(), environ)  # at the start of a rank, which then joins the others
        choose_device(environ)
    assert len(caplog.records) == messages


def test_a_gpu_that_cannot_run_the_document_is_refused(gpus: Any) -> None:
    bf16, fp16 = TrainSection(precision="bf16"), TrainSection(precision="fp16")
    gpus(1)
    check_gpu(bf16, {})
    gpus(1, "Tesla T4", (7, 5))
    check_gpu(fp16, {})
    for precision in ("bf16", "bf16-pure"):
        with refused(field="train.precision", got=precision):
            check_gpu(TrainSection(precision=precision), {})
    gpus(1, "Tesla V100", (7, 0))
    with refused("7.5", field="CUDA_VISIBLE_DEVICES", got="Tesla V100"):
        check_gpu(fp16, {})


def test_a_driver_that_is_too_old_is_no_reason_to_train_on_the_cpu(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(0)
    check_gpu(TrainSection(), {})  # a machine without GPUs, or with an empty CUDA_VISIBLE_DEVICES
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(host_info, "visible_gpus", lambda: 8)
    monkeypatch.setattr(host_info, "nvidia_driver", lambda: "570.172.08")
    with refused("580", field="CUDA_VISIBLE_DEVICES", got="all 8 GPUs"):
        check_gpu(TrainSection(), {})
    monkeypatch.setattr(torch.version, "cuda", None)  # a build for CPUs, chosen by the user
    check_gpu(TrainSection(), {})


def identities(*gpus: tuple[str, int], name: str = "NVIDIA H100") -> list[GpuIdentity]:
    return [GpuIdentity(host, (0, bus, 0), name) for host, bus in gpus]


def test_ranks_that_share_a_gpu_are_refused() -> None:
    compare_identities(identities(("a", 1), ("a", 2), ("b", 1), ("b", 2)), may_share=False)
    shared = identities(("a", 1), ("a", 2), ("b", 1), ("b", 1))
    with refused("ranks 2", "3", field="launch.processes", got=4):
        compare_identities(shared, may_share=False)
    compare_identities(shared, may_share=True)


def test_different_gpus_are_found() -> None:
    mixed = [*identities(("a", 1), ("a", 2)), *identities(("b", 1), name="NVIDIA A100")]
    assert compare_identities(mixed, may_share=False) == {"NVIDIA H100": [0, 1], "NVIDIA A100": [2]}


def test_architectures_are_ordered_by_number() -> None:
    assert [gpu_checks._architecture_number(name) for name in ("sm_90a", "sm_100", "compute_120f")] == [90, 100, 120]
