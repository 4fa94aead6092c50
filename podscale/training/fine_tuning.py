"""Parts of a model in fine-tuning: its classifier, frozen parameters, and factors of the learning rate."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from podscale import models
from podscale.config import ModelSection, RunConfig, TrainSection
from podscale.errors import InputError
from podscale.util.formatting import suggest_similar

HEAD = "head"
"""Pattern that stands for the classifier."""


def head_names(model: ModelSection, classes: int) -> tuple[str, ...]:
    """Return the arrays whose shapes depend on the number of classes: the classifier, and an auxiliary one."""
    shapes, other = (models.model_spec(model, count).array_shapes for count in (classes, classes + 1))
    return tuple(name for name, shape in shapes.items() if other[name] != shape)


def trained_spec(config: RunConfig, classes: int) -> models.ModelSpec:
    """Return the entry of the document's model, with the parameters frozen that `train.freeze` names.

    Raises InputError if the model cannot be built, or the document's patterns do not fit it.
    """
    spec = models.model_spec(config.model, classes)
    if not config.train.freeze:
        return spec
    names = [parameter.name for parameter in spec.parameters]
    return spec.freeze(frozen_names(config.train, names, head_names(config.model, classes)))


def frozen_names(train: TrainSection, names: Sequence[str], head: Sequence[str]) -> tuple[str, ...]:
    """Return the parameters that `train.freeze` freezes, in order.

    Args:
        names: all trained parameters of the model.
        head: those of the classifier.

    Raises:
        InputError: a pattern matches no parameter, or no parameter is left to train.
    """
    taken = [pattern for pattern in train.freeze if not pattern.startswith("!")]
    excepted = [pattern[1:] for pattern in train.freeze if pattern.startswith("!")]
    for pattern in (*taken, *excepted):
        _check_pattern(pattern, names, head, "train.freeze")
    frozen = tuple(
        name
        for name in names
        if any(_matches(name, pattern, head) for pattern in taken)
        and not any(_matches(name, pattern, head) for pattern in excepted)
    )
    if len(frozen) == len(names) and names:
        hint = "Except some, for example the classifier by '!head'."
        raise InputError("no parameter is left to train", field="train.freeze", got=list(train.freeze), hint=hint)
    return frozen


def learning_rate_scales(config: RunConfig, names: Sequence[str], classes: int) -> dict[str, float]:
    """Return the factor of each parameter's learning rate; empty if all are 1.

    Args:
        names: the parameters that are trained.
        classes: number of classes.

    Raises:
        InputError: a pattern matches no parameter, or the model has no blocks for `train.layer_decay`.
    """
    train = config.train
    if not train.learning_rate_scale and train.layer_decay is None:
        return {}
    head = head_names(config.model, classes)
    for pattern in train.learning_rate_scale:
        _check_pattern(pattern, names, head, "train.learning_rate_scale")
    scales = _decayed(config, names, head)
    for name in names:
        matching = [scale for pattern, scale in train.learning_rate_scale.items() if _matches(name, pattern, head)]
        scales[name] *= matching[-1] if matching else 1.0
    return scales


def _decayed(config: RunConfig, names: Sequence[str], head: Sequence[str]) -> dict[str, float]:
    """Return the factors of `train.layer_decay`."""
    if (decay := config.train.layer_decay) is None:
        return dict.fromkeys(names, 1.0)
    depths = layer_depths(names, head)
    last = max(depths.values())
    if last == 1:
        problem = f"{config.model.name} has no blocks with a number in their names"
        hint = "Leave it out, and give factors in train.learning_rate_scale."
        raise InputError(problem, field="train.layer_decay", got=decay, hint=hint)
    return {name: decay ** (last - depth) for name, depth in depths.items()}


def layer_depths(names: Sequence[str], head: Iterable[str]) -> dict[str, int]:
    """Return the depth of each parameter: 0 in the stem, then the number of its block; the classifier comes last.

    A block is a module with a number in its name, such as layer1.0, blocks.3 or stages.2.blocks.1. A parameter in no
    block counts to the block before it.
    """
    owners = {name: _block_of(name) for name in names}
    found = set(owners.values())
    stages = {block for block in found if any(other.startswith(f"{block}.") for other in found)}
    blocks: dict[str, int] = {}
    depths, current = {}, 0
    for name, block in owners.items():
        if block and block not in stages:
            current = blocks.setdefault(block, len(blocks) + 1)
        depths[name] = current
    last = len(blocks) + 1
    return depths | {name: last for name in head if name in depths}


NUMBERED = re.compile(r"(?:^|[a-z_-])\d+[a-z]?$", re.IGNORECASE)
"""Part of a name that ends in a number, with a letter in the Inceptions (Mixed_5b)."""
REPEATED = ("blocks", "layers")
"""Names of a list of blocks inside of a stage."""


def _block_of(name: str) -> str:
    """Return the block of a parameter, or its stage; "" if it belongs to a module that is neither."""
    parts = name.split(".")
    end = next((index + 1 for index, part in enumerate(parts) if NUMBERED.search(part)), 0)
    in_list = end > 1 and parts[end - 2] in REPEATED
    while 0 < end < len(parts):
        part = parts[end]
        if part.isdigit() or part.startswith(f"{parts[end - 1]}-"):
            end += 1
        elif part in REPEATED and end + 1 < len(parts) and parts[end + 1].isdigit():
            end, in_list = end + 2, True
        else:
            break
    return ".".join(parts[:end]) if 0 < end < len(parts) - (not in_list) else ""


def _matches(name: str, pattern: str, head: Sequence[str]) -> bool:
    return name in head if pattern == HEAD else fnmatchcase(name, pattern)


def _check_pattern(pattern: str, names: Sequence[str], head: Sequence[str], field: str) -> None:
    if any(_matches(name, pattern, head) for name in names):
        return
    hint = suggest_similar(pattern, names) or f"Examples of names are {', '.join(names[-2:])}; * matches any."
    raise InputError("no parameter has this name", field=field, got=pattern, hint=hint)
