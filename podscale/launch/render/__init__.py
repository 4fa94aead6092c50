"""From a job to the objects of a cluster: pure functions, one file for each kind of job."""

from collections.abc import Callable

from podscale.errors import InputError
from podscale.launch.jobspec import JobSpec
from podscale.launch.render import jaxjob, job, jobset, pytorchjob, trainjob
from podscale.launch.render.common import Manifest, Manifests

__all__ = ["RENDERERS", "Manifest", "Manifests", "backend_of", "render", "suited"]

RENDERERS: dict[str, Callable[[JobSpec], Manifests]] = {
    "pytorchjob": pytorchjob.render,
    "jaxjob": jaxjob.render,
    "trainjob": trainjob.render,
    "jobset": jobset.render,
    "job": job.render,
}


PREFERRED = ("pytorchjob", "trainjob", "jobset")
"""For CPUs and GPUs: the operator that this project is proven with comes first."""
PREFERRED_JAX = ("jaxjob", "jobset", "trainjob")
"""For JAX on CPUs and GPUs."""
PREFERRED_TPU = ("jobset", "trainjob")
"""TPU slices of several hosts are what JobSet is for; nobody vouches for JAXJob on TPUs."""


def suited(spec: JobSpec) -> tuple[str, ...]:
    """The kinds of job that can carry out `spec`, the best first; a plain job only where there is one pod."""
    if spec.min_nodes is not None:
        return PREFERRED[:1]  # only it is elastic
    if spec.slices > 1:
        return PREFERRED_TPU[:1]
    operators: tuple[str, ...] = PREFERRED_JAX if spec.engine == "jax" else PREFERRED
    if spec.hardware.kind == "tpu":
        operators = PREFERRED_TPU
    return (*operators, "job") if spec.nodes == 1 else operators


def backend_of(spec: JobSpec, backend: str) -> str:
    """The kind of job for a stage: `backend` where ranks on several pods must meet or it trains, else a plain job."""
    together = spec.stage == "train" or (spec.nodes > 1 and spec.stage != "shard")
    return backend if together else "job"


def render(spec: JobSpec, backend: str) -> Manifests:
    """The objects that carry out `spec` on `backend`, a name of BACKENDS.

    Raises InputError where that kind of job cannot do what is asked.
    """
    if backend not in RENDERERS:
        hint = f"Choose one of {', '.join(RENDERERS)}."
        raise InputError("no kind of job", field="launch.backend", got=backend, hint=hint)
    return RENDERERS[backend](spec)
