"""Render a job as the objects of a cluster: pure functions, one module for each kind of job."""

from collections.abc import Callable

from podscale.errors import InputError
from podscale.kubernetes.job_spec import JobSpec
from podscale.kubernetes.render import job, jobset, training_operator, trainjob
from podscale.kubernetes.render.common import JobManifests, Manifest

__all__ = ["RENDERERS_BY_KIND", "JobManifests", "Manifest", "choose_backend", "render_job", "suitable_backends"]

RENDERERS_BY_KIND: dict[str, Callable[[JobSpec], JobManifests]] = {
    "pytorchjob": training_operator.render_pytorchjob,
    "jaxjob": training_operator.render_jaxjob,
    "trainjob": trainjob.render_trainjob,
    "jobset": jobset.render_jobset,
    "job": job.render_plain_job,
}
PREFERRED_KINDS = ("pytorchjob", "trainjob", "jobset")
"""Kinds of job for PyTorch on CPUs and GPUs, best tested first."""
PREFERRED_KINDS_JAX = ("jaxjob", "jobset", "trainjob")
"""Kinds of job for JAX on CPUs and GPUs."""
PREFERRED_KINDS_TPU = ("jobset", "trainjob")
"""Kinds of job for TPUs. JobSet supports slices of several hosts; JAXJob is untested there."""


def suitable_backends(spec: JobSpec) -> tuple[str, ...]:
    """Return the kinds of job that can run `spec`, best first; a plain Job can only run one pod."""
    if spec.min_nodes is not None:
        return ("pytorchjob",)  # the only elastic kind
    if spec.slices > 1:
        return ("jobset",)
    operators: tuple[str, ...] = PREFERRED_KINDS_JAX if spec.engine == "jax" else PREFERRED_KINDS
    if spec.hardware.kind == "tpu":
        operators = PREFERRED_KINDS_TPU
    return (*operators, "job") if spec.nodes == 1 else operators


def choose_backend(spec: JobSpec, backend: str) -> str:
    """Return `backend` for training or for ranks on several pods, else `job` (a plain Job)."""
    needs_operator = spec.stage == "train" or (spec.nodes > 1 and spec.stage != "shard")
    return backend if needs_operator else "job"


def render_job(spec: JobSpec, backend: str) -> JobManifests:
    """Return the objects that run `spec` on `backend`. Raises InputError if that kind of job cannot run it."""
    if backend not in RENDERERS_BY_KIND:
        hint = f"Choose one of {', '.join(RENDERERS_BY_KIND)}."
        raise InputError("not a kind of job", field="launch.backend", got=backend, hint=hint)
    return RENDERERS_BY_KIND[backend](spec)
