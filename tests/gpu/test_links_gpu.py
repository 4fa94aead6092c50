"""`algorithm: auto` and `podscale bench allreduce` over NCCL, on one GPU or several."""

from pathlib import Path

import pytest
import torch

from podscale.bench import all_reduce
from podscale.config.train import AllReduceSection

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bench_allreduce_over_nccl(ranks: int) -> None:
    """Ranks share GPUs if there are fewer GPUs than ranks."""
    job = {
        "sections": {name: {"algorithm": name, "row": 1} for name in ("flat", "ring", "torus2d")},
        "sizes": [2**16, 2**24],
        "row": 1,
        "seconds": 0.1,
        "model": {"name": "resnet18"},
        "side": 64,
        "batch": 8,
    }
    report = all_reduce.run_link_benchmark(job, ranks, 300.0)
    assert (report["backend"], report["ranks"], report["rows"]) == ("nccl", ranks, [ranks, 1])
    assert all(one["error"] < 1e-6 for one in report["whole"])
    assert len(report["steps"]) == 3
    assert all_reduce.format_tables(report)


def test_auto_on_the_device(tmp_path: Path) -> None:
    """In this process, alone: timing waits for the device, and the chosen algorithm can be built."""
    from podscale.pytorch.all_reduce import build_all_reduce
    from podscale.pytorch.all_reduce.auto import resolve_algorithm
    from podscale.pytorch.stored_choice import StoredChoice
    from podscale.pytorch.world import join_world, leave_world

    section = AllReduceSection(algorithm="auto")
    world = join_world(60.0, {})
    try:
        choice = resolve_algorithm(section, world, 10**8, StoredChoice(tmp_path / "all_reduce.json"))
        bucket = torch.ones(2**20, device=world.device)
        build_all_reduce(choice.section(section), world)(bucket)
        assert bucket.eq(1).all()
        assert choice.fabric.slice_bytes == 8 * 2**20
    finally:
        leave_world()
