"""The gradient reducer against torch's DistributedDataParallel: step time and all-reduce time that nothing hides.

    OMP_NUM_THREADS=1 python benchmarks/reducer.py [--rounds 8] [--ranks 2]

Two gloo processes of one thread each. Every variant trains the same network on the same images; a round is `--steps`
steps of each variant in turn, so that a busy moment of the machine meets all. A step is forward, backward and the wait
for the averages (no optimizer). Exposed: from the end of backward until the averages are in place; DDP waits inside
backward, so its exposed time is the step's without reduction taken from the step's with it.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from conditions import RESULTS, head, publish
from torch import Tensor, nn
from world import run_world

from podscale.config import ModelSection
from podscale.config.train import AllReduceSection
from podscale.pytorch.models import build_model
from podscale.pytorch.reducer import GradientReducer, build_reducer, no_sync_unless_last
from podscale.pytorch.world import World


class Network(NamedTuple):
    """What is trained: a model section, images of one rank's batch and their side in pixels."""

    model: dict[str, Any]
    classes: int
    batch: int
    side: int


NETWORKS = {
    "ResNet-18, 32 px, batch 16": Network({"name": "resnet18", "stem": "small"}, 10, 16, 32),
    "ResNet-50, 64 px, batch 4": Network({"name": "resnet50"}, 1000, 4, 64),
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
    """One way to train the network."""

    def __init__(self, network: Network, section: dict[str, Any] | None, world: World) -> None:
        torch.manual_seed(0)
        self._model: nn.Module = build_model(ModelSection(**network.model), network.classes).train()
        parts = AllReduceSection(**(section or {"algorithm": "flat"}))
        self._reducer: GradientReducer = build_reducer(parts, self._model, world)
        self._reduces = section is not None

    def step(self, images: Tensor, labels: Tensor) -> Times:
        reducer = self._reducer
        begin = time.perf_counter()
        reducer.start_step()
        with no_sync_unless_last(reducer, last=self._reduces):
            loss = nn.functional.cross_entropy(reducer.module(images), labels)
            reducer.backward(loss, last=self._reduces)
        done = time.perf_counter()
        if self._reduces:
            reducer.finish()
        end = time.perf_counter()
        return Times(end - begin, end - done)


def measure(world: World, network: Network, rounds: int, steps: int) -> dict[str, list[Times]]:
    """Each round's mean times of every variant, on one rank."""
    variants = {name: Variant(network, section, world) for name, section in VARIANTS.items()}
    images = torch.randn(network.batch, 3, network.side, network.side)
    labels = torch.randint(0, network.classes, (network.batch,))
    found: dict[str, list[Times]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, variant in variants.items():
            world.barrier()
            times = [variant.step(images, labels) for _ in range(steps)]
            if number:  # the first round is for torch to settle: DDP lays out its buckets again
                found[name].append(Times(*(statistics.mean(part) for part in zip(*times, strict=True))))
    return found


def table(found: dict[str, list[Times]]) -> list[str]:
    """Medians over the rounds; ratios are taken within each round."""
    lines = ["| variant | ms a step | x DDP | wait after backward, ms | all-reduce in all that shows, ms |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name, times in found.items():
        ratio = statistics.median(own.step / ddp.step for own, ddp in zip(times, found["DDP"], strict=True))
        shown = statistics.median(own.step - bare.step for own, bare in zip(times, found["no reduction"], strict=True))
        step, wait = (statistics.median(part) * 1e3 for part in zip(*times, strict=True))
        lines.append(f"| {name} | {step:.1f} | {ratio:.3f} | {wait:.1f} | {shown * 1e3:.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="steps of a variant in a round")
    parser.add_argument("--results", type=Path, default=RESULTS / "reducer.md")
    options = parser.parse_args()
    lines = head("Averaging gradients", ["torch", "numpy"])
    lines.append(f"{options.ranks} processes of one thread, {options.rounds} rounds of {options.steps} steps; rank 0.")
    for name, network in NETWORKS.items():
        found = run_world(options.ranks, measure, network, options.rounds, options.steps)[0]
        lines += ["", f"## {name}", "", *table(found)]
    publish(options.results, lines)


if __name__ == "__main__":
    main()
