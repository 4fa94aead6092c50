"""Estimated memory of one training process: weights, gradients, optimizer and activations."""

from typing import NamedTuple

from podscale import models
from podscale.config import RunConfig, TrainSection
from podscale.config.batch_phases import largest_pass
from podscale.training.fine_tuning import trained_spec
from podscale.training.shampoo import preconditioner_elements

FLOAT_BYTES = {"fp32": 4, "bf16": 2, "bf16-pure": 2, "fp16": 2}
MOMENTS = {"sgd": 1, "lars": 1, "lamb": 2, "adam": 2, "rmsprop": 2, "nlcg": 3, "neumann": 2, "shampoo": 1}
"""fp32 values that each optimizer keeps per weight; some of its options (see `state_bytes`) add one."""
PLUGIN_MOMENTS = 2
"""fp32 values per weight that are assumed for the optimizer of a plug-in."""


class MemoryEstimate(NamedTuple):
    """Bytes of one training process, without those of Python and torch (see `memory_check.EXTRA_BYTES`).

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
