"""Preflight checks of a job on a cluster, from the document alone."""

from collections.abc import Iterator

from podscale.config.engine_support import requests_tpus
from podscale.config.images import TRAINING_IMAGES, our_image, suitable_images, wanted_accelerators
from podscale.config.run_config import RunConfig
from podscale.errors import InputError
from podscale.util.locations import Location


def cluster_problems(document: RunConfig) -> Iterator[InputError]:
    """Yield relative paths, and hardware or an image that does not fit the engine."""
    workspace = Location.parse(document.run.workspace).local_path
    source = Location.parse(document.data.source).local_path
    if workspace is not None and not workspace.is_absolute():
        yield InputError(
            "a relative path is a different directory in every pod",
            field="run.workspace",
            got=document.run.workspace,
            hint="Give the path where the shared volume is mounted in the pods, such as /workspace",
        )
    if source is not None and document.data.source_is_location and not source.is_absolute():
        hint = "Give the path inside the pods, or a gs:// or s3:// URL."
        yield InputError("a relative path", field="data.source", got=document.data.source, hint=hint)
    launch, engine = document.launch, document.train.engine
    if requests_tpus(document) and engine == "pytorch":
        yield InputError(
            "the PyTorch engine trains on GPUs and CPUs",
            field="launch.hardware",
            got=launch.hardware or launch.resources.accelerator,
            hint="Set train.engine=jax for TPUs.",
        )
    yield from _image_problems(document)


def _image_problems(document: RunConfig) -> Iterator[InputError]:
    """Yield an image of ours without the engine, or without the software of the pods' accelerators."""
    image, engine = document.launch.image, document.train.engine
    name, suitable = our_image(image), suitable_images(document)
    if name is None or name in suitable:
        return
    problem = f"has no software for the {wanted_accelerators(document)} of launch.hardware"
    if TRAINING_IMAGES[name].engine != engine:
        problem = f"does not hold the engine of train.engine={engine}"
    hint = f"Set launch.image to {' or '.join(suitable)}."
    yield InputError(problem, field="launch.image", got=image, hint=hint)


def rank_problems(document: RunConfig) -> Iterator[InputError]:
    """Yield an error if the number of ranks depends on the nodes of the pods."""
    launch = document.launch
    if not launch.processes and launch.hardware is None and not launch.resources.accelerators:
        problem = "one process per GPU, so the number of ranks depends on the nodes of the pods"
        yield InputError(problem, field="launch.processes", got=0, hint="Set the number of processes per pod.")
