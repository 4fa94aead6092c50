"""Ranks of the check of NCCL's paths run; on CPUs gloo sums their bucket, and there is no log."""

from pathlib import Path

import pytest

from podscale.bench.ranks import run_workers
from podscale.pytorch import nccl_paths


@pytest.mark.parametrize("arguments", [[], ["network"]])
def test_two_ranks_send_once(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    log = tmp_path / "log.txt"
    codes = run_workers("podscale.pytorch.nccl_paths", arguments, 2, 120.0, threads=1, log=log)
    assert codes == [0, 0], log.read_text()
    assert nccl_paths.parse_paths(log.read_text()) == ((), "")
