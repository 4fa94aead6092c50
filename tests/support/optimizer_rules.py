"""Two implementations of momentum over the same steps, for machines with and without a GPU."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podscale.pytorch.optim import HyperParams, Lars, Optimizer, ParamShard, ParamSlice, Sgd, lars, sgd
from podscale.pytorch.optim.sgd import ForeachMomentum
from podscale.training.param_layout import plan_buckets

SIZES = (40_000, 7, 165, 70_000, 64)
DECAYS = (True, False, True, True, False)

RULES: dict[str, Callable[[ParamShard], Optimizer]] = {
    "sgd": lambda share: Sgd(share, nesterov=True),
    "lars": lambda share: Lars(share, nesterov=False, trust_coefficient=0.02),
    "lars, norm of sum": lambda share: Lars(
        share, nesterov=True, trust_coefficient=0.02, trust="norm_of_sum", form="scaled"
    ),
}


def updated(
    rule: Callable[[ParamShard], Optimizer],
    momentum_update: Callable[..., Any],
    device: str,
    *,
    shards: int = 1,
    compact: bool = False,
) -> list[Tensor]:
    """Return weights and momentum of the first of `shards` after four steps of random gradients, one of them masked."""
    layout = plan_buckets(SIZES, 50_000, 32 * shards)
    segments = [
        ParamSlice(str(i), start, size, decays, decays)
        for i, (start, size, decays) in enumerate(zip(layout.starts, SIZES, DECAYS, strict=True))
    ]
    generator = np.random.default_rng(0)
    weights, gradients = torch.zeros(layout.length, device=device), torch.zeros(layout.length, device=device)
    for s in segments:
        weights[s.start : s.start + s.size] = torch.from_numpy(generator.normal(size=s.size).astype(np.float32))
    owned = [(start, start + (stop - start) // shards) for start, stop in layout.bounds]
    if compact:
        weights = torch.cat([weights[start:stop] for start, stop in owned])
    before = lars.build_momentum_update, sgd.build_momentum_update
    lars.build_momentum_update = sgd.build_momentum_update = momentum_update  # type: ignore[assignment]
    try:
        optimizer = rule(ParamShard(segments, owned, weights, gradients))
    finally:
        lars.build_momentum_update, sgd.build_momentum_update = before
    for step in range(4):
        gradients.zero_()
        if step != 2:
            for s in segments:
                drawn = generator.normal(size=s.size).astype(np.float32)
                gradients[s.start : s.start + s.size] = torch.from_numpy(drawn)
        row = torch.tensor([0.1 + 0.1 * step, 0.9, 1e-2, 2.0], device=device)
        assert optimizer.step(HyperParams(*row.unbind()), torch.tensor(step != 2, device=device)) == (step != 2)
    return [weights, *optimizer.moments.values()]


def main() -> None:
    """Print the difference between the fused kernels and lists of operations, as JSON by case."""
    from podscale.pytorch.optim.fused_momentum import FusedMomentum

    rows = {}
    cases = [(name, 1, False) for name in RULES] + [("lars", 3, False), ("lars", 3, True)]
    for name, shards, compact in cases:
        listed, fused = (
            updated(RULES[name], momentum_update, "cpu", shards=shards, compact=compact)
            for momentum_update in (ForeachMomentum, FusedMomentum)
        )
        assert all(tensor.abs().max() > 0.05 for tensor in listed)
        rows[f"{name}, {shards} shards, compact {compact}"] = max(
            (a - b).abs().max().item() for a, b in zip(listed, fused, strict=True)
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
