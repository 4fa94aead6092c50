"""Choice of how the kernels of 1x1 convolutions load their tiles."""

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from podscale.pytorch.batch_norm import gemm_calls, gemm_check
from podscale.pytorch.batch_norm.gemm_check import LoadComparison
from tests.support.triton_kernels import kernel_failure

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_calls, "use_descriptors", True)  # of another model


@pytest.mark.parametrize(
    ("capability", "found", "chosen", "message"),
    [
        ((9, 0), LoadComparison(False, 2e-3, 1e-3), True, "by tensor descriptors: two blocks take 2000 us"),
        ((10, 0), LoadComparison(False, 2e-3, 1e-3), True, "by tensor descriptors"),
        ((9, 0), LoadComparison(False, 1e-3, 2e-3), False, "by pointers: two blocks take 1000 us"),
        ((9, 0), LoadComparison(True, 2e-3, 1e-3), False, "which give other bits"),
        ((9, 0), "no C compiler", False, "tensor descriptors do not run here: Failed to find C compiler"),
        ((9, 0), "too little shared memory", False, "Required: 115100, Hardware limit: 101376"),
        ((8, 0), "too old to be compared", False, ""),
    ],
)
def test_descriptors_must_be_equal_and_faster(
    capability: tuple[int, int],
    found: Any,
    chosen: bool,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def compare(device: torch.device) -> LoadComparison:
        if isinstance(found, str):
            raise kernel_failure(found)
        return LoadComparison(*found)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(gemm_check, "compare_loads", compare)
    with caplog.at_level(logging.INFO):
        gemm_check.choose_loads(GPU)
    assert gemm_calls.use_descriptors is chosen
    assert message in caplog.text
    facts = gemm_check.load_facts
    assert facts["loads"] == ("tensor descriptors" if chosen else "pointers")
    assert ("problem" in facts) is (isinstance(found, str) and capability >= (9, 0))
    if isinstance(found, LoadComparison):
        expected = (found.pointer_seconds, found.descriptor_seconds, "other" if found.differ else "same")
        assert (float(facts["pointers_us"]) / 1e6, float(facts["descriptors_us"]) / 1e6, facts["bits"]) == expected


def test_a_cpu_has_no_descriptors() -> None:
    gemm_check.choose_loads(torch.device("cpu"))
    assert not gemm_calls.use_descriptors
    assert gemm_check.load_facts == {"loads": "pointers"}


class FakeKernels:
    """Separate operations, whose outputs are `changed` by descriptors; `loads` are the ways that were used."""

    def __init__(self, changed: float) -> None:
        self.changed, self.loads = changed, set[bool]()

    def __call__(self, blocks: gemm_check.Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        self.loads.add(gemm_calls.use_descriptors)
        factor = 1 + self.changed * gemm_calls.use_descriptors
        y, projected = gemm_check.run_separately(blocks)
        return y * factor, projected


@pytest.mark.parametrize("changed", [0.0, 1e-3])
def test_all_results_are_compared(changed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = FakeKernels(changed)
    monkeypatch.setattr(gemm_check, "run_kernels", kernels)
    monkeypatch.setattr(gemm_check, "LARGE", gemm_check.BlockShape(2, 6, 5, 32, 16))
    found = gemm_check.compare_loads(torch.device("cpu"))
    assert found.differ is bool(changed)
    assert min(found.pointer_seconds, found.descriptor_seconds) > 0
    assert kernels.loads == {False, True}
    assert not gemm_calls.use_descriptors
