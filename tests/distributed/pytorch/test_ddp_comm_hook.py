"""DDP hook with torch's DDP and several buckets: averages equal plain DDP's and the whole batch's float64 gradient."""

import copy
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from podscale.pytorch import ddp_comm_hook
from podscale.pytorch.comm_queue import build_comm_queue
from podscale.pytorch.world import World
from tests.support.refusals import refused

OPTIONS: list[dict[str, Any]] = [
    {"algorithm": "ring"},
    {"algorithm": "tree"},
    {"algorithm": "torus2d", "row": 2},
    {"algorithm": "hierarchical", "row": 2},
    {"algorithm": "hybrid", "row": 2, "hybrid_mb": 0.01},
    {"algorithm": "torus2d", "row": 2, "wire_column": "bf16"},
    {"algorithm": "flat", "wire_column": "int8"},
]
STEPS = 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(33, 33), nn.Tanh())), nn.Linear(33, 5))


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 33, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def gradients_of(module: nn.Module, rank: int, step: int) -> list[Tensor]:
    module.zero_grad()
    inputs, labels = data(rank, step)
    nn.functional.cross_entropy(module(inputs), labels).backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def hooked(world: World) -> dict[int, list[list[Tensor]]]:
    """Return the gradients of every step by number of the options; -1 is plain DDP."""
    gradients = {}
    for number, options in [(-1, None), *enumerate(OPTIONS)]:
        runs = []
        for _ in range(2):
            ddp = DistributedDataParallel(copy.deepcopy(network()), bucket_cap_mb=0.01)
            if options is not None:
                ddp_comm_hook.register(ddp, **options)
            runs.append([gradients_of(ddp, world.rank, step) for step in range(STEPS)])
        assert all(torch.equal(a, b) for one, two in zip(*runs, strict=True) for a, b in zip(one, two, strict=True))
        gradients[number] = runs[0]
    assert world.size == 4
    return gradients


def oracle(step: int) -> list[np.ndarray[Any, Any]]:
    model = network().double()
    batches = [data(rank, step) for rank in range(4)]
    logits = model(torch.cat([inputs for inputs, _ in batches]).double())
    nn.functional.cross_entropy(logits, torch.cat([labels for _, labels in batches])).backward()
    return [p.grad.numpy() for p in model.parameters() if p.grad is not None]


def test_hooks_average_as_ddp_does(run_world: Any) -> None:
    ranks = run_world(4, hooked)
    for step in range(STEPS):
        exact = oracle(step)
        for number, steps in ranks[0].items():
            short = number >= 0 and "wire_column" in OPTIONS[number]
            for index, (gradient, expected) in enumerate(zip(steps[step], exact, strict=True)):
                np.testing.assert_allclose(gradient.numpy(), expected, rtol=0, atol=2e-3 if short else 1e-7)
                assert all(torch.equal(gradient, other[number][step][index]) for other in ranks)


def half_precision(world: World) -> list[Tensor]:
    ddp = DistributedDataParallel(network().bfloat16(), bucket_cap_mb=0.01)
    ddp_comm_hook.register(ddp, algorithm="torus2d", row=2)
    inputs, labels = data(world.rank, 0)
    nn.functional.cross_entropy(ddp(inputs.bfloat16()).float(), labels).backward()
    return [p.grad for p in ddp.parameters() if p.grad is not None]


def test_half_precision_gradients_are_added_in_fp32(run_world: Any) -> None:
    ranks = run_world(4, half_precision)
    for index, expected in enumerate(oracle(0)):
        assert ranks[0][index].dtype == torch.bfloat16
        np.testing.assert_allclose(ranks[0][index].double().numpy(), expected, rtol=0, atol=4e-3)
        assert all(torch.equal(ranks[0][index], other[index]) for other in ranks)


def failing(world: World) -> None:
    """Check that a failed all-reduce and wrong options raise."""
    ddp = DistributedDataParallel(network(), bucket_cap_mb=0.01)
    ddp_comm_hook.register(ddp, algorithm="ring")

    def broken(bucket: Tensor) -> None:
        raise BrokenPipeError

    state = ddp_comm_hook.HookState(broken, build_comm_queue(world.device), world.device)
    bucket = SimpleNamespace(buffer=lambda: torch.ones(3))
    with pytest.raises(BrokenPipeError):
        ddp_comm_hook.average_bucket(state, bucket).wait()  # type: ignore[arg-type]
    with refused(field="algorithm", got="ddp"):
        ddp_comm_hook.register(ddp, algorithm="ddp")
    with refused("tree", field="wire_row", got="bf16"):
        ddp_comm_hook.register(ddp, algorithm="tree", wire_row="bf16")
    with refused(field="timeout_seconds", got=0):
        ddp_comm_hook.register(ddp, timeout_seconds=0)
    with refused(field="algoritm", got="tree"):
        ddp_comm_hook.register(ddp, algoritm="tree")


def test_failures_and_wrong_options_raise(run_world: Any) -> None:
    run_world(2, failing)


def missing_a_peer(world: World) -> float:
    """Return the seconds until a backward pass without the other rank fails; 0 on that other rank."""
    ddp = DistributedDataParallel(network(), bucket_cap_mb=0.01)
    ddp_comm_hook.register(ddp, algorithm="ring", timeout_seconds=4)
    for step in range(2):  # after the first, DDP itself uses the default group, which has a longer timeout
        gradients_of(ddp, world.rank, step)
    waited = 0.0
    if world.is_rank0:
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            gradients_of(ddp, 0, 2)
        waited = time.monotonic() - begin
    world.barrier()
    return waited


def test_a_missing_peer_fails_after_the_timeout(run_world: Any) -> None:
    waited, _ = run_world(2, missing_a_peer, timeout_seconds=60.0)
    assert 3 < waited < 30


@pytest.mark.slow
def test_the_documented_loop_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "explanation" / "all-reduce.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "loop.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(tmp_path / "loop.py")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 1
