"""Checks of a training before it starts, without building it: the model takes the images, a step fits the memory.

The memory of one process is estimated by its document: weights, gradients, optimizer and activations. A training on
CPUs that does not fit is refused, with settings that do.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

from podscale import models
from podscale.config import RunConfig, TrainSection, dumps, loads
from podscale.config.batch_phases import largest_pass
from podscale.config.preflight.host import MIN_PROCESS_BYTES, processes_per_node
from podscale.config.ranks import check_ranks
from podscale.errors import InputError
from podscale.training.fine_tuning import learning_rate_scales, trained_spec
from podscale.training.shampoo import preconditioner_elements
from podscale.util import env, host_info
from podscale.util.formatting import format_bytes

DEFAULT_CLASSES = 1000
"""Classes assumed before sharding; they count in the last layer alone."""
SMALL_NETWORK = ("model.name=resnet18", "input.image_size=128")
"""Settings for CPUs; the imagefolder preset names them too."""
MIN_PASS_IMAGES = 8
"""Fewest images in a proposed pass of one rank, because batch norm takes its statistics over them."""
EXTRA_BYTES = 1.2 * 2**30
"""Bytes of a process beyond the estimate, for proposed settings: Python, torch, batches in flight, workspaces.

Measured peaks of ResNet-50 at 224 px (16 and 32 images a pass) and ResNet-18 at 128 px (32 and 64) were 0.4 to 1.2 GiB
above the estimate, without GPUs. One more image of ResNet-50 took 83.5 MiB, and 83.2 in the estimate.
"""


def training_problems(config: RunConfig, classes: int | None = None) -> Iterator[InputError]:
    """Yield an error if the model does not take the document's images, else those of the training's memory."""
    classes = classes or DEFAULT_CLASSES
    if (problem := model_problem(config, classes)) is not None:
        yield problem
    else:
        yield from training_memory_problems(config, classes)


def model_problem(config: RunConfig, classes: int) -> InputError | None:
    """Return the error of a model that cannot be built, does not take the images, or lacks parameters of a pattern."""
    if config.train.engine == "jax":
        return None  # the document's own checks know its networks
    try:
        spec = trained_spec(config, classes)
        learning_rate_scales(config, [parameter.name for parameter in spec.parameters], classes)
        for size in sorted({*config.training_sizes, config.eval_image_size}):
            spec.check_image_size(size)
    except InputError as error:
        return error
    return None


def training_memory_problems(config: RunConfig, classes: int = DEFAULT_CLASSES) -> Iterator[InputError]:
    """Yield an error if one step on CPUs needs more memory than is free, with settings that fit.

    The estimate is a lower bound. GPUs and TPUs have a memory of their own, and JAX frees activations in an order that
    the estimate does not know. env.IGNORE_MEMORY turns the check off.
    """
    available = host_info.memory_info().available
    if os.environ.get(env.IGNORE_MEMORY) or not available or host_info.visible_gpus() or config.train.engine == "jax":
        return
    needed = node_memory(config, classes) + processes_per_node(config) * MIN_PROCESS_BYTES
    if needed <= available:
        return
    proposals, largest = _fitting_settings(config, classes, available), largest_pass(config.train)
    advice = f"Set {', or '.join(proposals)}." if proposals else f"Lower {largest.batch_option} or input.image_size."
    yield InputError(
        f"a step needs about {format_bytes(needed)} of memory, {format_bytes(available)} are free",
        field=largest.batch_option,
        got=largest.global_batch,
        hint=f"{advice} {env.IGNORE_MEMORY}=1 starts the run all the same",
    )


def node_memory(config: RunConfig, classes: int) -> int:
    """Return the estimated bytes of all training processes of one node."""
    processes = processes_per_node(config)
    return processes * sum(estimate_memory(config, classes, processes))


def _fitting_settings(config: RunConfig, classes: int, available: int) -> list[str]:
    """Return settings with which a step fits, with its bytes: more passes, a small network."""
    limit = available - processes_per_node(config) * EXTRA_BYTES
    proposals = []
    for accumulation in _larger_accumulations(config):
        changed = _change(config, f"train.accumulation={accumulation}")
        if changed is not None and (needed := node_memory(changed, classes)) <= limit:
            proposals.append(f"train.accumulation={accumulation} ({format_bytes(needed)})")
            break
    small = _change(config, *SMALL_NETWORK)
    if small is not None and (needed := node_memory(small, classes)) <= limit:
        proposals.append(f"{' and '.join(SMALL_NETWORK)} for a small network ({format_bytes(needed)})")
    return proposals


def _larger_accumulations(config: RunConfig) -> Iterator[int]:
    """Yield the larger multiples of the accumulation that leave every pass equally many images, and enough of them.

    They are those of the phase with the largest pass; none if it has its own accumulation, which `--set` cannot reach.
    """
    largest, ranks = largest_pass(config.train), processes_per_node(config) * config.launch.nodes
    if largest.accumulation_option != "train.accumulation":
        return
    per_rank, now = largest.global_batch // ranks, largest.accumulation
    for accumulation in range(2 * now, per_rank // MIN_PASS_IMAGES + 1, now):
        if largest.global_batch % (ranks * accumulation) == 0:
            yield accumulation


def _change(config: RunConfig, *changes: str) -> RunConfig | None:
    """Return a document with some options changed; None if it would contradict itself."""
    try:
        changed = loads(dumps(config), overrides=changes)
        check_ranks(changed, processes_per_node(changed) * changed.launch.nodes)
    except InputError:
        return None
    return changed


FLOAT_BYTES = {"fp32": 4, "bf16": 2, "bf16-pure": 2, "fp16": 2}
MOMENTS = {"sgd": 1, "lars": 1, "lamb": 2, "adam": 2, "rmsprop": 2, "nlcg": 3, "neumann": 2, "shampoo": 1, "muon": 1}
"""fp32 values that each optimizer keeps per weight; some of its options (see `state_bytes`) add one."""
PLUGIN_MOMENTS = 2
"""fp32 values per weight that are assumed for the optimizer of a plug-in."""


class MemoryEstimate(NamedTuple):
    """Bytes of one training process, without those of Python and torch (see `EXTRA_BYTES`).

    `weights` includes gradients, and `optimizer` masters, averages and Shampoo's matrices. `activations` are the
    outputs of convolutions and norms, which forward keeps for backward.
    """

    weights: int
    optimizer: int
    activations: int


def estimate_memory(config: RunConfig, classes: int, processes_per_node: int) -> MemoryEstimate:
    """Estimate the memory of one process of a run by its document, without building the model.

    Activations are those of the largest pass of any phase, with the largest images. Frozen parameters count as fp32
    weights alone.
    """
    spec = trained_spec(config, classes)
    frozen = models.model_spec(config.model, classes).num_parameters - spec.num_parameters
    ranks = processes_per_node * config.launch.nodes
    weights, optimizer = state_bytes(config.train, spec.num_parameters, ranks, processes_per_node)
    per_rank = largest_pass(config.train).pass_images // ranks
    elements = spec.saved_elements(max(config.training_sizes)) * per_rank
    return MemoryEstimate(
        weights + 4 * frozen,
        optimizer + matrix_bytes(config.train, spec, ranks),
        elements * FLOAT_BYTES[config.train.precision],
    )


def state_bytes(train: TrainSection, size: int, ranks: int, per_node: int) -> tuple[int, int]:
    """Return the bytes of weights and gradients, and those of the optimizer, of `size` parameters on a rank."""
    sharded = train.weight_update == "sharded"
    pure, rounded = train.precision == "bf16-pure", train.weight_gather == "bf16"
    weights = {(False, False): 4, (True, False): 4 + 2, (True, True): 2, (False, True): 2 + 4}[pure, rounded]
    reduce = train.all_reduce
    in_rows = reduce.algorithm == "torus2d" and reduce.shard_over == "row"
    shards = reduce.row or per_node if in_rows else ranks
    optimizer = train.optimizer
    moments = MOMENTS.get(optimizer.name, PLUGIN_MOMENTS)
    if optimizer.name == "shampoo":
        moments += optimizer.shampoo.graft != "sgd"
    elif optimizer.name == "nlcg":
        moments += optimizer.nlcg.beta == "polak_ribiere"
    if train.learning_rate_scale or train.layer_decay is not None:
        moments += 2  # the factor, and the weight before the step
    per_weight = 4 * (rounded + moments + (train.ema.decay is not None))
    return (4 + weights) * size, per_weight * size // (shards if sharded else 1)


def matrix_bytes(train: TrainSection, spec: models.ModelSpec, ranks: int) -> int:
    """Return the bytes of Shampoo's matrices on a rank: all inverse roots, and its share of the statistics."""
    if train.optimizer.name != "shampoo":
        return 0
    options = train.optimizer.shampoo
    elements = sum(preconditioner_elements(p.shape, options.block, vectors=options.vectors) for p in spec.parameters)
    return 4 * elements + 4 * elements // ranks
