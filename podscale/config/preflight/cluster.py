"""Preflight checks of a job on a cluster, from the document alone."""

import re
from collections.abc import Iterator

from podscale.config.engine_support import requests_tpus
from podscale.config.run_config import RunConfig
from podscale.errors import InputError
from podscale.util.locations import Location

IMAGE_ENGINES = {"podscale-base": "pytorch", "podscale-gpu": "pytorch", "podscale-tpu": "jax"}
"""Training engine of each of our container images (see images/)."""


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
    image_name = re.split("[:@]", launch.image.rpartition("/")[2])[0]
    if IMAGE_ENGINES.get(image_name, engine) != engine:
        suitable = " or ".join(name for name, installed in IMAGE_ENGINES.items() if installed == engine)
        problem = f"does not hold the engine of train.engine={engine}"
        yield InputError(problem, field="launch.image", got=launch.image, hint=f"Set launch.image to {suitable}.")


def rank_problems(document: RunConfig) -> Iterator[InputError]:
    """Yield an error if the number of ranks depends on the nodes of the pods."""
    launch = document.launch
    if not launch.processes and launch.hardware is None and not launch.resources.accelerators:
        problem = "one process per GPU, so the number of ranks depends on the nodes of the pods"
        yield InputError(problem, field="launch.processes", got=0, hint="Set the number of processes per pod.")
