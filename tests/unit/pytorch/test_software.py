"""Capabilities and versions of a torch without torch.distributed, as some builds are."""

import pytest
import torch

from podscale.pytorch import software


@pytest.fixture
def _no_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed of a build with USE_DISTRIBUTED=0 has `is_available` and little else."""
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    for name in ("is_nccl_available", "is_gloo_available"):
        monkeypatch.delattr(torch.distributed, name)


@pytest.mark.usefixtures("_no_distributed")
def test_a_torch_without_distributed_has_neither_gloo_nor_nccl() -> None:
    found = software.probe()
    assert (found.version, found.gloo, found.nccl) == (torch.__version__, False, "")
    assert software.library_versions()["NCCL"] == "none"
