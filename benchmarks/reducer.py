"""Step time and exposed all-reduce time of the gradient reducer, against torch's DistributedDataParallel.

    OMP_NUM_THREADS=1 python -m benchmarks.reducer [--rounds 8] [--ranks 2]

Two gloo processes of one thread each. Every variant trains the same model on the same images. A round is `--steps`
steps of each variant in turn, so that other load affects all alike. A step is forward, backward and the wait for the
averaged gradients, without optimizer. DDP waits inside backward, so the exposed time of a variant is the time of its
step minus that of a step without reduction.
"""

import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from benchmarks.measure import median_ratio
from benchmarks.world import run_world
from podscale.config import ModelSection
from podscale.config.train import AllReduceSection
from podscale.pytorch.models import build_model
from podscale.pytorch.reducer import GradientReducer, build_reducer, no_sync_unless_last
from podscale.pytorch.world import World


class Network(NamedTuple):
    """Model section, classes, images of one rank's batch, their side in pixels."""

    model: dict[str, Any]
    classes: int
    batch: int
    side: int


NETWORKS = {
    "ResNet-18, 32 px, batch 16": Network({"name": "resnet18", "stem": "small"}, 10, 16, 32),
    "ResNet-50, 64 px, batch 4": Network({"name": "resnet50"}, 1000, 4, 64),
}
SMALL_NETWORKS = {
    "ResNet-18 of width 4, 8 px, batch 2": Network({"name": "resnet18", "stem": "small", "width": 4}, 10, 2, 8)
}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "no reduction": None,
    "DDP": {"algorithm": "ddp"},
    "flat, overlap": {"algorithm": "flat", "overlap": True},
    "flat, no overlap": {"algorithm": "flat", "overlap": False},
    "torus2d, overlap": {"algorithm": "torus2d", "overlap": True},
    "torus2d, no overlap": {"algorithm": "torus2d", "overlap": False},
}


class Times(NamedTuple):
    """Seconds of one step, and of its wait after backward."""

    step: float
    wait: float


class Variant:
    """Model with one kind of gradient reduction."""

    def __init__(self, network: Network, section: dict[str, Any] | None, world: World) -> None:
        torch.manual_seed(0)
        self._model: nn.Module = build_model(ModelSection(**network.model), network.classes).train()
        all_reduce = AllReduceSection(**(section or {"algorithm": "flat"}))
        self._reducer: GradientReducer = build_reducer(all_reduce, self._model, world)
        self._reduces = section is not None

    def step(self, images: Tensor, labels: Tensor) -> Times:
        reducer = self._reducer
        start = time.perf_counter()
        reducer.start_step()
        with no_sync_unless_last(reducer, last=self._reduces):
            loss = nn.functional.cross_entropy(reducer.module(images), labels)
            reducer.backward(loss, last=self._reduces)
        backward_end = time.perf_counter()
        if self._reduces:
            reducer.finish()
        end = time.perf_counter()
        return Times(end - start, end - backward_end)


def measure(world: World, network: Network, rounds: int, steps: int) -> dict[str, list[Times]]:
    """Return the mean times of every round, by variant, on this rank."""
    variants = {name: Variant(network, section, world) for name, section in VARIANTS.items()}
    images = torch.randn(network.batch, 3, network.side, network.side)
    labels = torch.randint(0, network.classes, (network.batch,))
    by_variant: dict[str, list[Times]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, variant in variants.items():
            world.barrier()
            times = [variant.step(images, labels) for _ in range(steps)]
            if number:  # the first round warms up: DDP rebuilds its buckets
                by_variant[name].append(Times(*(statistics.mean(values) for values in zip(*times, strict=True))))
    return by_variant


def table(variants: dict[str, list[Times]]) -> list[str]:
    """Return medians over the rounds; ratios are taken within each round."""
    lines = ["| variant | ms a step | x DDP | wait after backward, ms | exposed all-reduce, ms |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name, times in variants.items():
        ratio = median_ratio([variant.step for variant in times], [ddp.step for ddp in variants["DDP"]])
        pairs = zip(times, variants["no reduction"], strict=True)
        exposed = statistics.median(variant.step - baseline.step for variant, baseline in pairs)
        step, wait = (statistics.median(values) * 1e3 for values in zip(*times, strict=True))
        lines.append(f"| {name} | {step:.1f} | {ratio:.3f} | {wait:.1f} | {exposed * 1e3:.1f} |")
    return lines


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_size("--rounds", full=8, small=1, type=int)
    parser.add_size("--steps", full=5, small=1, type=int, help="steps of a variant in a round")
    options = parser.read()
    lines = head("Gradient reducer", ["torch", "numpy"])
    lines.append(
        f"{options.ranks} processes of one thread, {options.rounds} rounds of {options.steps} steps; rank 0. Exposed "
        "all-reduce: the time of a step minus that of a step without reduction. DDP waits inside backward."
    )
    for name, network in (SMALL_NETWORKS if options.small else NETWORKS).items():
        times = run_world(options.ranks, measure, network, options.rounds, options.steps)[0]
        lines += ["", f"## {name}", "", *table(times)]
    write_results(options.results, "reducer.md", lines)


if __name__ == "__main__":
    main()
