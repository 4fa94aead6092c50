"""Trajectories of the published presets: 20 steps of a tiny network on 64 images, 16 a step, in float64.

The whole schedule of a preset takes place in these steps. Its rows are compared as they are. The training has them with
rates scaled to a peak at which the network learns, and with constants that would not act in 20 steps multiplied. So the
losses show the form of every rule, and the rows the value of every constant.

The golden file is PyTorch's, and `jax_trajectories` compares the JAX engine with it. In float64 the losses are the same
on every machine to 1e-14, where ReLUs amplify what fp32 rounds to 1e-2. Write the file, on purpose:
`python -m tests.support.preset_trajectories`.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from podscale import models
from podscale.config import RunConfig, load
from podscale.pipelines.presets import published_presets, resolve_preset
from podscale.training import schedules
from tests.support.tiny import SHALLOW

GOLDEN = Path(__file__).with_name("preset_trajectories.json")
STEPS, IMAGES, BATCH, SIDE, CLASSES = 20, 64, 16, 16, 10
PEAK_RATES = {"sgd": 0.05, "lars": 0.5, "lamb": 0.01, "nlcg": 0.05, "neumann": 0.1, "shampoo": 0.1, "rmsprop": 0.01}
DECAY_FACTOR, EPS_FACTOR, TRUST_FACTOR, ALPHA_FACTOR = 100.0, 1e3, 20.0, 1e5
ROWS, LOSSES = 2e-6, 1e-9
"""Relative tolerances: rounding of the golden values. Other CPUs differ by 1e-14, the engines by 6e-10."""


class Trajectory(NamedTuple):
    """Schedule rows [steps, 3] of a preset, losses [steps], and the mean of batch norm's final running variances."""

    schedule: list[list[float]]
    losses: list[float]
    variance: float


def golden() -> dict[str, Trajectory]:
    return {name: Trajectory(**values) for name, values in json.loads(GOLDEN.read_text()).items()}


def differences(found: Trajectory, want: Trajectory, times: float = 1.0) -> set[str]:
    """Return the parts that differ by more than so many tolerances; losses up to the last one that was found."""
    compared = {
        "schedule": (found.schedule, want.schedule, ROWS, 1e-9),
        "losses": (found.losses, want.losses[: len(found.losses)], LOSSES, 0.1 * LOSSES),
        "variance": (found.variance, want.variance, LOSSES, 0.0),
    }
    return {
        part
        for part, (a, b, relative, absolute) in compared.items()
        if not np.allclose(a, b, times * relative, times * absolute)
    }


def is_noticed(losses: list[float], want: Trajectory) -> bool:
    """Return True if losses, from the first step on, differ by more than ten tolerances."""
    return "losses" in differences(want._replace(losses=losses), want, times=10.0)


def tiny(name: str, changes: Sequence[str] = ()) -> RunConfig:
    """Return a preset's document, with `changes` (`key=value`), for a network of width 8 on one device."""
    values = load(resolve_preset(name), list(changes)).model_dump()
    model, train, images = values["model"], values["train"], values["input"]
    norm, optimizer = model["batch_norm"], train["optimizer"]
    options = {"block", "blurpool", "stochastic_depth", "zero_init_last_gamma"} & set(model)
    if optimizer["eps"] is not None:
        optimizer["eps"] *= EPS_FACTOR
    optimizer["trust_coefficient"] *= TRUST_FACTOR if optimizer["name"] == "lars" else 1.0
    optimizer["neumann"]["alpha"] *= ALPHA_FACTOR if optimizer["name"] == "neumann" else 1.0
    keys = {"accumulation", "epochs", "label_smoothing", "loss", "binary_threshold", "mix", "optimizer", "schedule"}
    phases = [
        {key: value for key, value in phase.items() if key not in ("image_size", "crop")} for phase in train["phases"]
    ]
    return RunConfig.model_validate(
        {
            "run": {"id": name, "seed": 1},
            "input": {key: images[key] for key in ("mean", "std", "per_image_standardization")}
            | {"image_size": SIDE, "loader": "reference"},
            "model": {key: model[key] for key in options}
            | {"name": "resnet18", "stem": "small", "width": 8}
            | {"batch_norm": {key: norm[key] for key in ("momentum", "eps", "running")}},
            "train": {key: train[key] for key in keys} | {"phases": phases, "global_batch": BATCH},
        }
    )


def schedule_rows(config: RunConfig) -> npt.NDArray[np.float32]:
    """Return the schedule of a run compressed into `STEPS` steps."""
    return schedules.step_table(config.train, samples(config))  # type: ignore[arg-type]


def samples(config: RunConfig) -> float:
    return BATCH * STEPS / config.train.epochs


def scaled_rows(config: RunConfig) -> npt.NDArray[np.float32]:
    """Return the rows with the rate that the tiny network can take, and a weight decay that acts in 20 steps."""
    train = config.train
    factors = [PEAK_RATES[train.optimizer.name] / train.schedule.learning_rate, 1.0, DECAY_FACTOR]
    return (schedule_rows(config) * factors).astype(np.float32)


def batch_of(step: int) -> slice:
    """Return the images of a step, of those of `data`."""
    start = step * BATCH % IMAGES
    return slice(start, start + BATCH)


@cache
def data() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return images with a pattern for each class under noise, [n, side, side, 3], and labels."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, CLASSES, IMAGES)
    patterns = generator.uniform(40, 215, (CLASSES, SIDE, SIDE, 3))
    images = patterns[labels] + generator.normal(0, 40, (IMAGES, SIDE, SIDE, 3))
    return images.clip(0, 255).astype(np.uint8), labels


def initial_weights(config: RunConfig) -> dict[str, npt.NDArray[np.float32]]:
    """Return He's initialisation by name, the same for both engines, with biases that a decay of theirs changes."""
    generator, weights = np.random.default_rng(1), {}
    for parameter in models.model_spec(config.model, CLASSES).parameters:
        is_last = parameter.name.endswith("bn2.weight") and config.model.zero_init_last_gamma
        if parameter.role == "weight":
            value = generator.normal(0, np.sqrt(2 / np.prod(parameter.shape[1:])), parameter.shape)
        elif parameter.role == "bias":
            value = generator.normal(0, 1, parameter.shape)
        else:
            is_scale = parameter.role == "norm_scale" and not is_last
            value = np.full(parameter.shape, float(is_scale))
        weights[parameter.name] = value.astype(np.float32)
    return weights


@contextmanager
def torch_world() -> Iterator[Any]:
    """Join a world of one rank, with one thread."""
    import torch

    from podscale.pytorch.world import join_world, leave_world

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield join_world(60.0, {})
    finally:
        leave_world()
        torch.set_num_threads(threads)


class TorchInFloat64(ModuleType):
    """The module `torch` for the engine's modules, with float64 where their code says float32."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return torch.float64 if name == "float32" else getattr(torch, name)


@contextmanager
def float64_engine() -> Iterator[None]:
    """Let the PyTorch engine compute in float64, its messages included."""
    import torch

    from podscale.pytorch.all_reduce.wire_formats import WIRE_FORMATS, CastFormat
    from podscale.pytorch.flat_buffers import GATHER_DTYPES

    engine = [module for name, module in sys.modules.items() if name.startswith("podscale.pytorch.")]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
            stack.enter_context(patch.dict(WIRE_FORMATS, fp32=CastFormat(torch.float64)))
            stack.enter_context(patch.dict(GATHER_DTYPES, fp32=torch.float64))
            for module in engine:
                if getattr(module, "torch", None) is torch:
                    stack.enter_context(patch.object(module, "torch", TorchInFloat64("torch")))
            yield
    finally:
        torch.set_default_dtype(default)


def train_in_torch(
    config: RunConfig, world: Any, is_enough: Callable[[list[float]], bool] = lambda losses: False
) -> Trajectory:
    """Train by the engine's own train step, on one rank (see `torch_world`), in float64.

    Args:
        is_enough: called with the losses so far; True ends the training.
    """
    import torch

    from podscale.data.loaders.base import Batch
    from podscale.pytorch.device_prefetcher import DeviceBatch
    from podscale.pytorch.trainer import build_model_on_device, build_train_step

    rows = scaled_rows(config).astype(np.float64)
    with SHALLOW, patch.object(schedules, "step_table", lambda *_: rows), float64_engine():
        spec, model = models.model_spec(config.model, CLASSES), build_model_on_device(config, world, CLASSES)
        for name, value in initial_weights(config).items():
            model.get_parameter(name).data.copy_(torch.from_numpy(value))
        step = build_train_step(config, world, model, spec, samples(config))  # type: ignore[arg-type]
        losses = []
        for number in range(STEPS):
            pixels, labels = (values[batch_of(number)] for values in data())
            host = Batch(pixels, labels, np.arange(BATCH, dtype=np.uint64), np.ones(BATCH, np.float32), number)
            batch = DeviceBatch(torch.from_numpy(pixels), torch.from_numpy(labels), host)
            result = step(batch, lambda _: nullcontext())
            assert result.finite, (config.run.id, number)
            assert result.loss.dtype == torch.float64
            losses.append(float(result.loss))
            if is_enough(losses):
                break
        step.reducer.close()
    variances = [float(value.mean()) for name, value in model.named_buffers() if name.endswith("running_var")]
    return Trajectory(schedule_rows(config).tolist(), losses, float(np.mean(variances)))


def _rounded(trajectory: Trajectory) -> dict[str, Any]:
    rows = [[float(f"{value:.7g}") for value in row] for row in trajectory.schedule]
    losses = [round(loss, 10) for loss in trajectory.losses]
    return {"schedule": rows, "losses": losses, "variance": round(trajectory.variance, 10)}


def main() -> None:
    """Write the golden file from the PyTorch engine."""
    with torch_world() as world:
        found = {name: train_in_torch(tiny(name), world) for name in published_presets()}
    lines = [f"{json.dumps(name)}: {json.dumps(_rounded(trajectory))}" for name, trajectory in found.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
