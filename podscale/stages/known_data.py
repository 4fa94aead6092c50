"""Images and classes of a run as far as they are known before its stages, and the problems that follow from them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from podscale.config import RunConfig
from podscale.config.preflight.storage import shard_set_counts
from podscale.config.start import WEIGHT_SCHEMES
from podscale.errors import InputError
from podscale.export.web_runtime import runtime_problems
from podscale.runs import RunDirectory, dataset_directory, stage_outcomes
from podscale.runs.checkpoint.format import complete_entries
from podscale.training.preflight import training_problems


def start_problems(config: RunConfig, target: Literal["here", "containers"], *, fresh: bool) -> Iterator[InputError]:
    """Yield the problems of a run that this machine starts.

    They are those of its page, and those of the model, its initial weights and its memory unless the training is
    finished.

    Args:
        target: software of the stages: of this machine, or of an image, which is checked in the container.
    """
    if target == "here":
        yield from runtime_problems(config)
    shard_set = dataset_directory(config.run.workspace, config.data)
    if fresh or not shard_set_counts(config) or not stage_outcomes.finished_outcome(config, "train", shard_set):
        yield from training_problems(config, known_data(config)[1])
        if fresh or not complete_entries(RunDirectory.for_config(config).checkpoints):
            yield from _missing_weights(config)


def _missing_weights(config: RunConfig) -> Iterator[InputError]:
    """Yield the problem of a file of weights that is not there; a resumed run needs it no more."""
    name = config.train.start_from.weights
    if name is not None and not name.startswith(WEIGHT_SCHEMES) and not Path(name).expanduser().exists():
        hint = "Name a file or the directory of a model."
        yield InputError("there is no such file", field="train.start_from.weights", got=name, hint=hint)


def known_data(config: RunConfig) -> tuple[dict[str, int], int | None]:
    """Return the images by split and the number of classes, as far as known without reading the source."""
    if counts := shard_set_counts(config):
        from podscale.data.shard_set import ShardSet

        return counts, len(ShardSet.open(dataset_directory(config.run.workspace, config.data)).classes)
    if names := config.data.only_classes or config.data.classes:
        return {}, len(names)
    return {}, 10 if config.data.source == "digits" else None
