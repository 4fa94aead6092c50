"""Our container images that train (see images/), and the one that the pods of a document need."""

import re
from typing import NamedTuple

from podscale.config.engine_support import requests_gpus, requests_tpus
from podscale.config.run import RunDocument

AUTO = "auto"
"""Value of launch.image: ours for the engine and the accelerators."""


class TrainingImage(NamedTuple):
    """Training engine of an image, and the accelerators that it has software for, "" for none."""

    engine: str
    accelerators: str


TRAINING_IMAGES = {
    "podscale-base": TrainingImage("pytorch", ""),
    "podscale-gpu": TrainingImage("pytorch", "GPUs"),
    "podscale-tpu": TrainingImage("jax", "TPUs"),
    "podscale-gpu-jax": TrainingImage("jax", "GPUs"),
}
"""All of them also train on CPUs. Of several that a run can use, `auto` takes the first one."""


def stage_image(config: RunDocument, engine: str | None = None) -> str:
    """Return the image of a document's stages, or of pods with another engine than the training's."""
    image = config.launch.image
    return f"{suitable_images(config, engine)[0]}:latest" if image == AUTO else image


def our_image(image: str) -> str | None:
    """Return the name of an image of ours that trains, without registry and tag; None for another one."""
    name = re.split("[:@]", image.rpartition("/")[2])[0]
    return name if name in TRAINING_IMAGES else None


def wanted_accelerators(config: RunDocument) -> str:
    """Return the accelerators of the pods, as in TrainingImage."""
    return "TPUs" if requests_tpus(config) else "GPUs" if requests_gpus(config) else ""


def suitable_images(config: RunDocument, engine: str | None = None) -> list[str]:
    """Return those of our images that have an engine, the document's by default, and the accelerators' software.

    None has PyTorch for TPUs, which preflight refuses; then they are those with the engine.
    """
    engine, wanted = engine or config.train.engine, wanted_accelerators(config)
    with_engine = [name for name, content in TRAINING_IMAGES.items() if content.engine == engine]
    suitable = [name for name in with_engine if wanted in ("", TRAINING_IMAGES[name].accelerators)]
    return suitable or with_engine
