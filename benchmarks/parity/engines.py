"""Training by each engine on four ranks, with the same weights, batches and schedule."""

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.parity.cases import RANKS, ParityInput, TrainingResult
from benchmarks.world import receive_answers, run_world, send_answer
from podscale import models
from podscale.config import RunConfig
from podscale.training import schedules

if TYPE_CHECKING:
    from podscale.pytorch.world import World


def train_with_torch(config: RunConfig, inputs: list[ParityInput]) -> list[TrainingResult]:
    """Train once for each input with the PyTorch engine on four gloo processes."""
    return run_world(RANKS, _torch_rank, config, inputs)[0]


def _torch_rank(world: "World", config: RunConfig, inputs: list[ParityInput]) -> list[TrainingResult]:
    return [_train_torch(world, config, data) for data in inputs]


def _train_torch(world: "World", config: RunConfig, data: ParityInput) -> TrainingResult:
    import torch

    from podscale.data.loaders.base import Batch
    from podscale.pytorch import trainer
    from podscale.pytorch.device_prefetcher import DeviceBatch, Normalise
    from podscale.pytorch.train_state import load_weights_file
    from podscale.training.step_timer import untimed

    network = trainer.build_model_on_device(config, world, data.classes)
    load_weights_file(network, data.weights)
    spec = models.model_spec(config.model, data.classes)
    step = trainer.build_train_step(config, world, network, spec, data.samples)
    normalise = Normalise(config.input, world, channels_last=config.train.channels_last)
    losses = []
    for number, (images, labels) in enumerate(zip(data.images, data.labels, strict=True)):
        rank_slice = slice(world.rank * len(labels) // world.size, (world.rank + 1) * len(labels) // world.size)
        source = Batch(images[rank_slice], labels[rank_slice], np.zeros(0, np.uint64), np.zeros(0, np.float32), number)
        batch = DeviceBatch(torch.from_numpy(images[rank_slice]), torch.from_numpy(labels[rank_slice]), source)
        losses.append(step(batch, untimed).loss.item())
    network.eval()
    with torch.no_grad():
        predictions = network(normalise(torch.from_numpy(data.validation_images))).argmax(1).numpy()
    return TrainingResult(losses, float((predictions == data.validation_labels).mean()))


def train_with_jax(config: RunConfig, inputs: list[ParityInput]) -> list[TrainingResult]:
    """Train once for each input with the JAX engine on four simulated devices of a new process."""
    return _run_process(partial(_train_jax, config, inputs))


def _train_jax(config: RunConfig, inputs: list[ParityInput]) -> list[TrainingResult]:
    import jax

    from podscale.data.step_positions import step_positions
    from podscale.jax.device_prefetcher import normalise
    from podscale.jax.mesh import mesh_for_config
    from podscale.jax.models import build_model
    from podscale.jax.train_state import load_weights_file
    from podscale.jax.train_step import build_train_step

    classes = inputs[0].classes
    spec = models.model_spec(config.model, classes)
    positions = step_positions(config.train, inputs[0].samples)
    step = build_train_step(config, mesh_for_config(config, jax.devices()[:RANKS]), classes, positions)
    apply = build_model(config.model)

    @jax.jit
    def predict(parameters: Any, statistics: Any, images: Any) -> Any:
        return apply(parameters, statistics, normalise(images, config.input), train=False)[0].argmax(1)

    results = []
    for data in inputs:
        state, losses = step.init_state(*load_weights_file(spec, data.weights)), []
        schedule = schedules.step_table(config.train, data.samples)
        for images, labels in zip(data.images, data.labels, strict=True):
            state, metrics = step.run_steps(state, step.put_batches(images[None], labels[None]), schedule)
            losses.append(float(metrics.loss[0]))
        parameters = {name: np.asarray(array) for name, array in step.layout.unpack(state.weights).items()}
        statistics = {name: np.asarray(array) for name, array in state.statistics.items()}
        correct = np.asarray(predict(parameters, statistics, data.validation_images)) == data.validation_labels
        results.append(TrainingResult(losses, float(correct.mean())))
    return results


def _run_process(body: Callable[[], list[TrainingResult]]) -> list[TrainingResult]:
    """Run `body` in a new process with simulated devices, which are set before jax is imported."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=send_answer, args=(writer, body))
    environment = dict(os.environ)
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={RANKS} "
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600 "
        "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
    }
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(environment)
    writer.close()
    try:
        (results,) = receive_answers([reader])
        return list(results)
    finally:
        process.join(30)
        process.kill()


ENGINES = {"pytorch": train_with_torch, "jax": train_with_jax}
