"""One training by each engine: the same weights, batches and schedule, on four ranks of their own kind."""

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.parity.cases import RANKS, Data, Trained
from benchmarks.world import receive_answers, run_world, send_answer
from podscale import models
from podscale.config import RunConfig
from podscale.training import schedules

if TYPE_CHECKING:
    from podscale.pytorch.world import World


def by_torch(config: RunConfig, inputs: list[Data]) -> list[Trained]:
    """The PyTorch engine on four gloo processes: one training for each of the data."""
    return run_world(RANKS, _torch_rank, config, inputs)[0]


def _torch_rank(world: "World", config: RunConfig, inputs: list[Data]) -> list[Trained]:
    return [_train_torch(world, config, data) for data in inputs]


def _train_torch(world: "World", config: RunConfig, data: Data) -> Trained:
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
        own = slice(world.rank * len(labels) // world.size, (world.rank + 1) * len(labels) // world.size)
        source = Batch(images[own], labels[own], np.zeros(0, np.uint64), np.zeros(0, np.float32), number)
        batch = DeviceBatch(torch.from_numpy(images[own]), torch.from_numpy(labels[own]), source)
        losses.append(step(batch, untimed).loss.item())
    network.eval()
    with torch.no_grad():
        answers = network(normalise(torch.from_numpy(data.validation_images))).argmax(1).numpy()
    return Trained(losses, float((answers == data.validation_labels).mean()))


def by_jax(config: RunConfig, inputs: list[Data]) -> list[Trained]:
    """The JAX engine on four simulated devices of a process of its own."""
    return _run_process(partial(_train_jax, config, inputs))


def _train_jax(config: RunConfig, inputs: list[Data]) -> list[Trained]:
    import jax

    from podscale.jax.device_prefetcher import normalise
    from podscale.jax.mesh import mesh_for_config
    from podscale.jax.models import build_model
    from podscale.jax.train_state import load_weights_file
    from podscale.jax.train_step import build_train_step

    classes = inputs[0].classes
    spec = models.model_spec(config.model, classes)
    step = build_train_step(config, mesh_for_config(config, jax.devices()[:RANKS]), classes)
    apply = build_model(config.model)

    @jax.jit
    def answers(parameters: Any, statistics: Any, images: Any) -> Any:
        return apply(parameters, statistics, normalise(images, config.input), train=False)[0].argmax(1)

    found = []
    for data in inputs:
        state, losses = step.init_state(*load_weights_file(spec, data.weights)), []
        schedule = schedules.step_table(config.train, data.samples)
        for images, labels in zip(data.images, data.labels, strict=True):
            state, metrics = step.run_steps(state, step.put_batches(images[None], labels[None]), schedule)
            losses.append(float(metrics.loss[0]))
        trained = {name: np.asarray(array) for name, array in step.layout.unpack(state.weights).items()}
        statistics = {name: np.asarray(array) for name, array in state.statistics.items()}
        right = np.asarray(answers(trained, statistics, data.validation_images)) == data.validation_labels
        found.append(Trained(losses, float(right.mean())))
    return found


def _run_process(body: Callable[[], list[Trained]]) -> list[Trained]:
    """Run `body` in a fresh process with simulated devices, which must be there before jax is imported."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=send_answer, args=(writer, body))
    before = dict(os.environ)
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
        os.environ.update(before)
    writer.close()
    try:
        (trained,) = receive_answers([reader])
        return list(trained)
    finally:
        process.join(30)
        process.kill()


ENGINES = {"pytorch": by_torch, "jax": by_jax}
