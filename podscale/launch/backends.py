"""The kinds of job that a cluster may carry out a stage with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class JobBackend:
    """One kind of job, as the API server names it."""

    name: str
    group: str
    version: str
    kind: str
    plural: str
    container: str
    """Name of the container that carries out the stage; its operator looks for it."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"


JOB_BACKENDS = {
    backend.name: backend
    for backend in (
        JobBackend("pytorchjob", "kubeflow.org", "v1", "PyTorchJob", "pytorchjobs", "pytorch"),
        JobBackend("jaxjob", "kubeflow.org", "v1", "JAXJob", "jaxjobs", "jax"),
        JobBackend("trainjob", "trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs", "node"),
        JobBackend("jobset", "jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets", "podscale"),
        JobBackend("job", "batch", "v1", "Job", "jobs", "podscale"),
    )
}
