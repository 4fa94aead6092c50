"""The kinds of job that a cluster may carry out a stage with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
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


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("pytorchjob", "kubeflow.org", "v1", "PyTorchJob", "pytorchjobs", "pytorch"),
        Backend("jaxjob", "kubeflow.org", "v1", "JAXJob", "jaxjobs", "jax"),
        Backend("trainjob", "trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs", "node"),
        Backend("jobset", "jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets", "podscale"),
        Backend("job", "batch", "v1", "Job", "jobs", "podscale"),
    )
}
