"""A training step on a CPU core by both engines' networks: forward, backward, and JAX with XLA's convolution alone.

    python -m benchmarks.jax_cpu [--rounds 9] [--cases digits resnet50]

Every round takes each variant once, in turn, so that a busy moment of the machine meets all; the time is the CPU time
of the process (one thread computes), and ratios are of medians.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from benchmarks.conditions import head
from benchmarks.harness import Options, start_again_with, write_results
from podscale.config import ModelSection
from podscale.jax.models import build_model, initialise
from podscale.jax.models.layers import ConvolutionFunction, matmul_convolution, xla_convolution
from podscale.jax.train_step import smoothed_cross_entropy
from podscale.pytorch.models import build_model as build_torch_model
from podscale.pytorch.train_step import smoothed_cross_entropy as loss_of_torch

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NPROC": "1", "JAX_PLATFORMS": "cpu"}
"""One thread for either library, which reads its variable when it is imported."""
CLASSES, SMOOTHING = 10, 0.1


class Case(NamedTuple):
    """Work of one process in a step: network, images, their side in pixels."""

    title: str
    model: ModelSection
    images: int
    side: int


CASES = {
    "digits": Case(
        "the digits run's network, 32 images of 16 px", ModelSection(name="resnet18", stem="small", width=16), 32, 16
    ),
    "resnet50": Case("ResNet-50, 16 images of 64 px", ModelSection(name="resnet50"), 16, 64),
    "tiny": Case("ResNet-18 of width 4, 2 images of 8 px", ModelSection(name="resnet18", stem="small", width=4), 2, 8),
}


def variants(case: Case) -> dict[str, Callable[[], Any]]:
    """Loss and gradients of one batch, by each way."""
    generator = np.random.default_rng(0)
    images = generator.normal(size=(case.images, case.side, case.side, 3)).astype(np.float32)
    labels = generator.integers(0, CLASSES, case.images)
    return {
        "torch": of_torch(case, images, labels),
        "jax": of_jax(case, images, labels, matmul_convolution),
        "jax, XLA's convolution": of_jax(case, images, labels, xla_convolution),
    }


def of_torch(case: Case, images: Any, labels: Any) -> Callable[[], Any]:
    network = build_torch_model(case.model, CLASSES).train().to(memory_format=torch.channels_last)
    given, wanted = torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)

    def step() -> None:
        network.zero_grad()
        loss_of_torch(network(given), wanted, SMOOTHING).backward()

    return step


def of_jax(case: Case, images: Any, labels: Any, convolve: ConvolutionFunction) -> Callable[[], Any]:
    apply = build_model(case.model, convolve=convolve)
    parameters, running = jax.device_put(initialise(case.model, CLASSES, seed=0))
    given = jax.device_put((images, labels.astype(np.int32)))

    @jax.jit
    @jax.value_and_grad
    def step(parameters: Any, images: Any, labels: Any) -> Any:
        logits, _ = apply(parameters, running, images, train=True)
        return smoothed_cross_entropy(logits, labels, SMOOTHING)

    return lambda: jax.block_until_ready(step(parameters, *given))


def measure(case: Case, rounds: int) -> list[str]:
    """Lines of the table; the first round compiles and warms up."""
    ways = variants(case)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, step in ways.items():
            started = time.process_time()
            step()
            seconds[name].append(time.process_time() - started)
    medians = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    return [
        f"| {case.title} | {name} | {1e3 * medians[name]:.1f} | {medians[name] / medians['torch']:.2f} "
        f"| {taken[0] - medians[name]:.1f} |"
        for name, taken in seconds.items()
    ]


def main() -> None:
    parser = Options(__doc__)
    parser.add_size("--rounds", full=9, small=1, type=int)
    parser.add_size("--cases", full=["digits", "resnet50"], small=["tiny"], nargs="+", choices=CASES)
    options = parser.read()
    start_again_with(ENVIRONMENT)
    torch.set_num_threads(1)
    lines = head("The JAX engine's training step on a CPU core", ["jax", "jaxlib", "torch"])
    lines += [
        f"Medians of {options.rounds} rounds, fp32, forward and backward; without input, all-reduce and update.",
        "",
        "| step | by | ms of CPU time | over torch | first call more, s |",
        "|---|---|---|---|---|",
    ]
    for name in options.cases:
        lines += measure(CASES[name], options.rounds)
    write_results(options.results, "jax-cpu.md", lines)


if __name__ == "__main__":
    main()
