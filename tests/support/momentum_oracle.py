"""Fused momentum in Triton's interpreter beside the equations in float64, with NumPy."""

import json

import numpy as np
import torch

from podscale.pytorch.optim import ParamShard, ParamSlice
from podscale.pytorch.optim.fused_momentum import FusedMomentum
from podscale.training.param_layout import plan_buckets
from tests.support.triton_interpreter import adapt_interpreter

SIZES, DECAYS = (40_000, 7, 165, 3000), (True, False, True, False)


def relative_error(found: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(found.double().numpy() - expected).max() / np.abs(expected).max())


def all_errors() -> dict[str, float]:
    """Return the errors of norms, weights and momentum by case, relative to the largest value."""
    layout = plan_buckets(SIZES, 50_000, 32)
    slices = [
        ParamSlice(str(i), start, size, decays, decays)
        for i, (start, size, decays) in enumerate(zip(layout.starts, SIZES, DECAYS, strict=True))
    ]
    random, errors = np.random.default_rng(0), dict[str, float]()
    for nesterov in (False, True):
        weights, gradients = torch.zeros(layout.length), torch.zeros(layout.length)
        for s in slices:
            weights[s.start : s.start + s.size] = torch.from_numpy(random.normal(size=s.size).astype(np.float32))
        shard = ParamShard(slices, [*layout.bounds], weights, gradients)
        fused = FusedMomentum(shard, nesterov=nesterov)
        w, m, decay, keep = weights.double().numpy().copy(), np.zeros(layout.length), 0.01, 0.9
        for step in range(2):
            for s in slices:
                drawn = random.normal(size=s.size).astype(np.float32)
                gradients[s.start : s.start + s.size] = torch.from_numpy(drawn)
            g = gradients.double().numpy()
            inside, outside = random.uniform(0.5, 1.5, (2, len(SIZES)))
            weight_norms, sum_norms = fused.norms(torch.tensor(decay), of_sum=True)
            fused.step(
                torch.tensor(inside, dtype=torch.float32),
                torch.tensor(outside, dtype=torch.float32),
                torch.tensor(keep),
                torch.tensor(decay),
                torch.tensor(True),
                decayed=False,
            )
            expected_norms = []
            for i, s in enumerate(slices):
                at = slice(s.start, s.start + s.size)
                decayed = g[at] + decay * DECAYS[i] * w[at]
                expected_norms.append((np.linalg.norm(w[at]), np.linalg.norm(decayed)))
                u = inside[i] * decayed
                m[at] = keep * m[at] + u
                w[at] -= outside[i] * (u + keep * m[at] if nesterov else m[at])
            for name, found, column in (("weights", weight_norms, 0), ("sums", sum_norms, 1)):
                squares = torch.zeros(len(slices), dtype=torch.float64)
                squares.index_add_(0, shard.slice_of_chunk, found.double() ** 2)
                if step == 0:
                    norms = np.array([row[column] for row in expected_norms])
                    errors[f"norms of {name}, nesterov {nesterov}"] = relative_error(squares.sqrt(), norms)
        errors[f"weights, nesterov {nesterov}"] = relative_error(weights, w)
        errors[f"momentum, nesterov {nesterov}"] = relative_error(fused.values, m)
    return errors


def main() -> None:
    adapt_interpreter()
    print(json.dumps(all_errors()))


if __name__ == "__main__":
    main()
