"""Names of published weights in the words of our catalogue."""

import re
from collections.abc import Callable, Mapping, Sequence

from podscale.models.spec import Shape

Replacement = str | Callable[[re.Match[str]], str]
Renames = Sequence[tuple[str, Replacement]]
"""Pairs of a regular expression and its replacement, applied to each name in order."""

WRAPPERS: Renames = ((r"^(?:module|_orig_mod|model|backbone|net|encoder)\.(?=\w)", ""),)
"""Prefixes of containers around a network, such as DistributedDataParallel."""
TIMM_RESNET_V2: Renames = (
    (r"^stem\.conv\.", "conv1."),
    (r"^norm\.", "bn_last."),
    (r"^head\.fc\.", "fc."),
    (r"^stages\.(\d)\.blocks\.", lambda match: f"layer{int(match[1]) + 1}."),
    (r"\.norm(\d)\.", r".bn\1."),
    (r"\.downsample\.conv\.", ".downsample.0."),
)
"""timm's resnetv2 in our names of block v2."""
MAPPINGS: Mapping[str, Renames] = {
    "its own names": (),
    "a container's names": (*WRAPPERS, *WRAPPERS),
    "timm's names of resnetv2": TIMM_RESNET_V2,
}
"""Known renamings by the source of the names."""
IGNORED = re.compile(r"(^|\.)num_batches_tracked$")
"""Arrays that no model of Podscale has."""


def rename(names: Sequence[str], renames: Renames) -> dict[str, str]:
    """Return the new name of each name."""
    changed = {}
    for name in names:
        new = name
        for pattern, replacement in renames:
            new = re.sub(pattern, replacement, new)
        changed[name] = new
    return changed


def best_mapping(shapes: Mapping[str, Shape], expected: Mapping[str, Shape]) -> dict[str, str]:
    """Return the names in `expected` of the arrays of published weights, by the known renaming that fits most arrays.

    Classifiers of one channel per class have weights that are 1x1 convolutions in some libraries; their shapes differ
    by dimensions of one element alone.
    """
    names = [name for name in shapes if not IGNORED.search(name)]

    def fitting(mapping: Mapping[str, str]) -> int:
        return sum(squeezed(shapes[name]) == squeezed(expected.get(new, ())) for name, new in mapping.items())

    return max((rename(names, renames) for renames in MAPPINGS.values()), key=fitting)


def squeezed(shape: Shape) -> Shape:
    """Return a shape without its trailing dimensions of one element."""
    end = len(shape)
    while end > 1 and shape[end - 1] == 1:
        end -= 1
    return tuple(shape[:end])
