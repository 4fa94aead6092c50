"""Options of the matrix: every value that the run document has."""

from itertools import product
from typing import Any, get_args

from podscale.config import TrainSection
from podscale.config.optimizer import OptimizerName
from podscale.config.train import AllReduceSection

PRECISIONS = get_args(TrainSection.model_fields["precision"].annotation)
OPTIMIZERS = get_args(OptimizerName)
NOT_TRACED = ("auto", "ddp")
"""`auto` measures links and then takes another one; DistributedDataParallel does not run on fake tensors."""
WITHOUT_SHARDS = ("tree", "hierarchical", "hybrid")
"""Algorithms without a reduce-scatter, which a sharded step needs."""
ALGORITHMS = get_args(AllReduceSection.model_fields["algorithm"].annotation)
UPDATES = get_args(TrainSection.model_fields["weight_update"].annotation)


def _train(algorithm: str, update: str) -> dict[str, Any]:
    return {"all_reduce": {"algorithm": algorithm}, "weight_update": update}


ALL_REDUCES = [
    _train(algorithm, update)
    for algorithm, update in product(ALGORITHMS, UPDATES)
    if algorithm not in NOT_TRACED and not (update == "sharded" and algorithm in WITHOUT_SHARDS)
]
"""`train` sections of every algorithm, with every weight update that it supports."""
RING, TORUS, HIERARCHICAL = (_train(algorithm, "replicated") for algorithm in ("ring", "torus2d", "hierarchical"))
SHARDED_TORUS = _train("torus2d", "sharded")


def option_id(value: Any) -> str:
    """Return the id of a test: the values of its options."""
    return ", ".join(map(option_id, value.values())) if isinstance(value, dict) else str(value)
