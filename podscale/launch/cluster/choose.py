"""Which kind of job carries out a training: what the document says, else what the cluster has and hardware needs."""

from podscale.errors import InputError
from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.resources import JOB_KINDS, KIND_PROVIDERS
from podscale.launch.jobspec import JobSpec
from podscale.launch.render import suitable_backends


def choose_job_kind(api: ClusterClient, spec: JobSpec, backend: str) -> str:
    """The name of a backend. `auto`, and `local` where something is submitted all the same, look at the cluster.

    Raises InputError where it has nothing that could carry out the training.
    """
    if backend not in ("auto", "local"):
        return backend
    kinds = suitable_backends(spec)
    found = next((name for name in kinds if api.serves(JOB_KINDS[name])), None)
    if found is not None:
        return found
    provider = KIND_PROVIDERS[JOB_KINDS[kinds[0]].group]
    raise InputError(
        f"this cluster has none of {', '.join(JOB_KINDS[name].kind for name in kinds)}, of which {spec.name} needs one",
        field="launch.backend",
        got=backend,
        hint=f"Install {provider.name} {provider.version} or newer: {provider.install}",
    )
