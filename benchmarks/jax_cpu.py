"""CPU time of forward and backward by both engines' models, and by JAX with XLA's convolutions.

    python -m benchmarks.jax_cpu [--rounds 9] [--cases digits resnet50]

A round runs every variant once, so that other load affects all alike. Times are CPU time of the process, which computes
in one thread; ratios are of medians.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from benchmarks.conditions import head
from benchmarks.harness import Options, restart_with, write_results
from podscale.config import ModelSection
from podscale.jax.models import build_model, initialise
from podscale.jax.models.layers import ConvolutionFunction, matmul_convolution, xla_convolution
from podscale.jax.train_step import smoothed_cross_entropy
from podscale.pytorch.models import build_model as build_torch_model
from podscale.pytorch.train_step import smoothed_cross_entropy as torch_cross_entropy

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NPROC": "1", "JAX_PLATFORMS": "cpu"}
"""One thread for torch and jax, which read these variables on import."""
CLASSES, SMOOTHING = 10, 0.1


class Case(NamedTuple):
    """Work of one process in a step; `side` in pixels."""

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
    """Return functions that compute loss and gradients of one batch, by name."""
    generator = np.random.default_rng(0)
    images = generator.normal(size=(case.images, case.side, case.side, 3)).astype(np.float32)
    labels = generator.integers(0, CLASSES, case.images)
    return {
        "torch": torch_step(case, images, labels),
        "jax": jax_step(case, images, labels, matmul_convolution),
        "jax, XLA's convolution": jax_step(case, images, labels, xla_convolution),
    }


def torch_step(case: Case, images: Any, labels: Any) -> Callable[[], Any]:
    network = build_torch_model(case.model, CLASSES).train().to(memory_format=torch.channels_last)
    image_tensor, label_tensor = torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)

    def step() -> None:
        network.zero_grad()
        torch_cross_entropy(network(image_tensor), label_tensor, SMOOTHING).backward()

    return step


def jax_step(case: Case, images: Any, labels: Any, convolve: ConvolutionFunction) -> Callable[[], Any]:
    apply = build_model(case.model, convolve=convolve)
    parameters, running = jax.device_put(initialise(case.model, CLASSES, seed=0))
    batch = jax.device_put((images, labels.astype(np.int32)))

    @jax.jit
    @jax.value_and_grad
    def step(parameters: Any, images: Any, labels: Any) -> Any:
        logits, _ = apply(parameters, running, images, train=True)
        return smoothed_cross_entropy(logits, labels, SMOOTHING)

    return lambda: jax.block_until_ready(step(parameters, *batch))


def measure(case: Case, rounds: int) -> list[str]:
    """Return the rows of a case; the first round compiles and warms up."""
    steps = variants(case)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return [
        f"| {case.title} | {name} | {1e3 * medians[name]:.1f} | {medians[name] / medians['torch']:.2f} "
        f"| {times[0] - medians[name]:.1f} |"
        for name, times in seconds.items()
    ]


def main() -> None:
    parser = Options(__doc__)
    parser.add_size("--rounds", full=9, small=1, type=int)
    parser.add_size("--cases", full=["digits", "resnet50"], small=["tiny"], nargs="+", choices=CASES)
    options = parser.read()
    restart_with(ENVIRONMENT)
    torch.set_num_threads(1)
    lines = head("The JAX engine's training step on a CPU core", ["jax", "jaxlib", "torch"])
    lines += [
        f"Medians of {options.rounds} rounds, fp32, forward and backward; without input, all-reduce and optimizer.",
        "",
        "| step | engine | ms of CPU time | x torch | compilation (first call - median), s |",
        "|---|---|---|---|---|",
    ]
    for name in options.cases:
        lines += measure(CASES[name], options.rounds)
    write_results(options.results, "jax-cpu.md", lines)


if __name__ == "__main__":
    main()
