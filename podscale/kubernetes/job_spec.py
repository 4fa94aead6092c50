"""Job specification: one stage of one run, independent of the kind of job."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from podscale.config import RunConfig, dumps, load_values
from podscale.config.engine_support import TPU_RESOURCE
from podscale.config.identity import changed_result_values
from podscale.config.images import stage_image
from podscale.config.launch import ClusterSection
from podscale.config.telemetry import TelemetrySection
from podscale.errors import InputError
from podscale.hardware import CPU, Hardware, find_hardware
from podscale.kubernetes.pod_resources import PodResources, pod_resources, validate_job
from podscale.kubernetes.resources import KubernetesObject, annotations_of
from podscale.runs import dataset_directory, local_path
from podscale.runs.stage_outcomes import StageName
from podscale.runs.user_code import bundle_code
from podscale.util.locations import Location
from podscale.version import VERSION

SecurityMode = Literal["restricted", "privileged"]
JobStage = StageName | Literal["predict", "serve"]
"""Stage of pods; predictions and servers are no stages of a run, because there may be any number of them."""

METRICS_PORT = 9464
"""Port of the pods' metrics; the container port is named `metrics`."""
MAX_DOCUMENT_BYTES = 120_000
"""Largest document in an environment variable (Linux: 128 KiB for one string)."""
NAME_LABEL, RUN_LABEL, STAGE_LABEL = "app.kubernetes.io/name", "podscale.dev/run", "podscale.dev/stage"
IDENTITY_ANNOTATION, VERSION_ANNOTATION = "podscale.dev/identity", "podscale.dev/version"
START_ANNOTATION = "podscale.dev/start"
"""Annotation of the leading pod with the start of the job's pods, which rank 0 reads."""
LAUNCHER_ANNOTATION, PIPELINE_LAUNCHER = "podscale.dev/launcher", "pipeline"
"""Annotation, and its value, of jobs that a pipeline task launched."""
CACHE_PATH = "/cache"
METRICS_SECRETS_PATH = "/etc/podscale"
"""Mount path of the certificate and the token of the pods' metrics."""


@dataclass(frozen=True)
class MountedSecret:
    """Secret whose keys are mounted as files."""

    name: str
    secret: str

    @property
    def path(self) -> str:
        return f"{METRICS_SECRETS_PATH}/{self.name}"


@dataclass(frozen=True)
class JobSpec:
    """One stage of one run: pods, ranks per pod, resources, and the run document of the pods.

    Args:
        identity: SHA-256 in hex, the same for jobs with the same result.
        document: Run document of the pods, as YAML.
        min_nodes: Fewest pods with which an elastic job continues.
        cache_path: Directory in the pods for remote shards; None without a cache.
        grace_seconds: Time from the stop request to the kill.
        pipeline: A pipeline task launches the job.
        parts: Parts of a prediction, each by a pod of its own; 0 for other stages.
        parallel: Pods of a prediction at the same time.
    """

    run: str
    stage: JobStage
    identity: str
    document: str
    shard_set: str
    command: tuple[str, ...]
    image: str
    nodes: int
    processes_per_node: int
    hardware: Hardware
    resources: PodResources
    security_mode: SecurityMode
    workspace: str
    cluster: ClusterSection
    engine: str = "pytorch"
    min_nodes: int | None = None
    slices: int = 1
    gpudirect: str | None = None
    cache_path: str | None = None
    max_restarts: int = 0
    grace_seconds: float = 60.0
    time_limit_seconds: int = 0
    pipeline: bool = False
    parts: int = 0
    parallel: int = 0

    @property
    def name(self) -> str:
        """Name of the job: the run's id, with the stage unless it is the training."""
        return self.run if self.stage == "train" else f"{self.run}-{self.stage}"

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def pods(self) -> int:
        """Pods at the same time."""
        return self.parallel or self.nodes

    @property
    def needs_accelerators(self) -> bool:
        """True if the pods need the hardware of the document; otherwise they run on any node."""
        return self.stage not in ("shard", "report")

    @property
    def selector(self) -> dict[str, str]:
        """Labels that select the pods of this job and no others."""
        return {RUN_LABEL: self.run, STAGE_LABEL: self.stage}

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the job and its owned objects."""
        return {
            NAME_LABEL: "podscale",
            "app.kubernetes.io/component": self.stage,
            "app.kubernetes.io/managed-by": "podscale",
            **self.selector,
            **self.cluster.labels,
        }

    @property
    def annotations(self) -> dict[str, str]:
        """Annotations of the job."""
        return {
            IDENTITY_ANNOTATION: self.identity,
            VERSION_ANNOTATION: VERSION,
            **({LAUNCHER_ANNOTATION: PIPELINE_LAUNCHER} if self.pipeline else {}),
            **self.cluster.annotations,
        }

    @property
    def launcher_grace_seconds(self) -> float:
        """Time without a heartbeat of the launcher after which the job stops, seconds; 0 if it never does."""
        return self.cluster.launcher_grace_minutes * 60 if self.pipeline else 0.0


def build_job_spec(
    config: RunConfig, stage: StageName, shard_set: str | None = None, *, mounted: bool = True, pipeline: bool = False
) -> JobSpec:
    """Return the specification of a stage's job.

    Args:
        shard_set: Location of the shards; by default that of the run's own shard stage.
        mounted: Check that volumes have the files that the pods need; False if another tool mounts the volumes.
        pipeline: A pipeline task launches the job.

    Raises:
        InputError: The document contradicts itself or does not fit the hardware; the text lists all problems.
    """
    launch, cluster = config.launch, config.launch.cluster
    named, has_ranks = _resolve_hardware(config), stage in ("train", "evaluate")
    hardware = named if has_ranks else CPU
    nodes = _node_count(config, stage, hardware)
    processes = launch.processes or (1 if hardware.kind == "tpu" else max(1, hardware.accelerators))
    location = shard_set or dataset_directory(config.run.workspace, config.data)
    cached = stage != "shard" and (Location.parse(location).is_remote or (has_ranks and cluster.local_ssd))
    cache_path = (config.input.cache_dir or CACHE_PATH) if cached else None
    security = _resolve_security_mode(cluster, named)  # of every stage, because other users cannot replace root's files
    gpudirect = _resolve_gpudirect(cluster, hardware, nodes) if stage == "train" else None
    resources = pod_resources(config, stage, hardware, processes, cached=cached, gpudirect=gpudirect is not None)
    validate_job(config, stage, hardware, nodes, processes, resources, location if mounted else None)
    return JobSpec(
        run=config.run.id,
        stage=stage,
        identity=job_identity(config, stage, location),
        document=_pod_document(config, nodes if stage == "train" else launch.nodes, processes, cache_path),
        shard_set=location,
        command=_stage_command(stage, location, nodes),
        image=stage_image(config),
        nodes=nodes,
        processes_per_node=processes,
        hardware=hardware,
        resources=resources,
        security_mode=security,
        workspace=str(local_path(config.run.workspace)),
        cluster=cluster,
        engine=config.train.engine,
        min_nodes=cluster.min_nodes if stage == "train" else None,
        slices=cluster.slices if stage == "train" else 1,
        gpudirect=gpudirect,
        cache_path=cache_path,
        max_restarts=launch.max_restarts,
        grace_seconds=launch.grace_seconds,
        time_limit_seconds=round(launch.time_limit_hours * 3600),
        pipeline=pipeline,
    )


def is_pipeline_job(job: KubernetesObject) -> bool:
    """Return True if a pipeline task launched this job."""
    return annotations_of(job).get(LAUNCHER_ANNOTATION) == PIPELINE_LAUNCHER


def launched_stages(config: RunConfig) -> tuple[StageName, ...]:
    """Return the stages of a pipeline that a launcher runs as jobs; the others run in the pod of their task.

    A task is one pod, so the evaluation on a TPU slice of several machines is a job too.
    """
    if config.launch.backend == "local":
        return ()
    return ("train", "evaluate") if _resolve_hardware(config).hosts > 1 else ("train",)


def job_identity(config: RunConfig, stage: StageName, shard_set: str) -> str:
    """Return the hash of the changed options of class result, the shard set and the stage.

    An option that came later does not change the identity of an older version's job.
    """
    values = {"stage": stage, "shard_set": shard_set, "document": changed_result_values(config)}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _resolve_hardware(config: RunConfig) -> Hardware:
    """Return the hardware that the document names, else that of its resources."""
    named, resources = config.launch.hardware, config.launch.resources
    if named is not None:
        return find_hardware(named)
    if not resources.accelerators:
        return CPU
    kind: Literal["gpu", "tpu"] = "tpu" if resources.accelerator == TPU_RESOURCE else "gpu"
    name = f"{resources.accelerators} {resources.accelerator}"
    return Hardware(name, kind, resource=resources.accelerator, accelerators=resources.accelerators)


def _node_count(config: RunConfig, stage: StageName, hardware: Hardware) -> int:
    """Return the number of pods. All hosts of a TPU slice take part, also in evaluation."""
    if stage == "shard":
        return config.launch.shard_pods
    if stage == "train":
        return hardware.hosts * config.launch.cluster.slices if hardware.hosts > 1 else config.launch.nodes
    return hardware.hosts


def _resolve_security_mode(cluster: ClusterSection, hardware: Hardware) -> SecurityMode:
    if cluster.security is not None:
        return cluster.security
    return "privileged" if hardware.kind == "tpu" or cluster.network == "gpudirect" else "restricted"


def _resolve_gpudirect(cluster: ClusterSection, hardware: Hardware, nodes: int) -> str | None:
    """Return the hardware's kind of GPUDirect if the document requests it, or permits it and several nodes use it."""
    is_automatic = cluster.network == "auto" and cluster.security == "privileged" and nodes > 1
    return hardware.gpudirect if cluster.network == "gpudirect" or is_automatic else None


def _stage_command(stage: StageName, location: str, nodes: int) -> tuple[str, ...]:
    if stage != "shard":
        return ("podscale", stage, "--shard-set", location)
    return ("podscale", stage, *(() if nodes == 1 else ("--index", "$(JOB_COMPLETION_INDEX)", "--of", str(nodes))))


def _pod_document(config: RunConfig, nodes: int, processes_per_node: int, cache_path: str | None) -> str:
    """Return the document of the pods, as YAML: launched locally, with metrics for the cluster."""
    values: dict[str, Any] = bundle_code(config).model_dump(mode="json")
    values["launch"].update(backend="local", nodes=nodes, processes=processes_per_node)
    values["telemetry"] = pod_telemetry(config).model_dump(mode="json")
    if cache_path is not None:
        values["input"]["cache_dir"] = cache_path
    text = dumps(load_values(values, "the document of the pods"))
    if len(text.encode()) > MAX_DOCUMENT_BYTES:
        raise InputError(
            f"longer than {MAX_DOCUMENT_BYTES} bytes, the limit for an environment variable of the pods",
            field="run document",
            got=len(text.encode()),
            hint="Shorten it, for example by removing data.classes.",
        )
    return text


def metrics_secrets(cluster: ClusterSection) -> list[MountedSecret]:
    """Return the Secrets that pods need to serve metrics."""
    named = {"metrics-tls": cluster.metrics_tls_secret, "metrics-token": cluster.metrics_token_secret}
    return [MountedSecret(name, secret) for name, secret in named.items() if secret is not None]


def pod_telemetry(config: RunConfig) -> TelemetrySection:
    """Return the telemetry section of a pod: served to the cluster, with files from the mounted Secrets."""
    files: dict[str, Any] = {"address": "0.0.0.0", "port": METRICS_PORT}
    cluster = config.launch.cluster
    for secret in metrics_secrets(cluster):
        if secret.name == "metrics-token":
            files["bearer_token_file"] = f"{secret.path}/token"
        else:
            files |= {"tls_certificate": f"{secret.path}/tls.crt", "tls_key": f"{secret.path}/tls.key"}
            files |= {"tls_client_ca": f"{secret.path}/ca.crt"} if cluster.metrics_mutual_tls else {}
    return config.telemetry.model_copy(update=files)
