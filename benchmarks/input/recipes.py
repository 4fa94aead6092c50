"""Augmentation recipes: the loader native with a preset's input section, beside its authors' transforms."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from benchmarks.input.others import Transform, pil_pipeline, timm_transform, torchvision_transforms
from benchmarks.input.pipelines import Pipeline, podscale_loader
from podscale.config import load
from podscale.pipelines import presets


class Recipe(NamedTuple):
    """Input of a preset as its authors compute it."""

    authors: str
    pipeline: Pipeline


def torchvision_v2(size: int) -> Transform:
    """Transforms of torchvision's reference script with its new recipe; it normalises before it erases."""
    from torchvision.transforms import v2

    crop = torchvision_transforms(size, "bilinear")
    return v2.Compose([crop, v2.TrivialAugmentWide(), v2.PILToTensor(), v2.RandomErasing(0.1)])


RECIPES: Mapping[str, Recipe] = {
    "goyal2017-8k": Recipe("torchvision", pil_pipeline(partial(torchvision_transforms, interpolation="bilinear"))),
    "torchvision-v2": Recipe("torchvision", pil_pipeline(torchvision_v2)),
    "rsb-a1": Recipe(
        "timm", pil_pipeline(partial(timm_transform, interpolation="random", auto_augment="rand-m7-mstd0.5-inc1"))
    ),
    "rsb-a3": Recipe(
        "timm", pil_pipeline(partial(timm_transform, interpolation="random", auto_augment="rand-m6-mstd0.5-inc1"))
    ),
}
"""Recipes by preset."""


def preset_loader(preset: str) -> tuple[Pipeline, int]:
    """Return the pipeline of the loader native with a preset's filter and augmentation, and the preset's side."""
    section = load(presets.resolve_preset(preset)).input
    options = {"augment": section.augment.model_dump(exclude_defaults=True)}
    return podscale_loader("native", section.interpolation, options), section.image_size
