"""Launch section: launcher, machines, processes, and the job's settings on a Kubernetes cluster."""

from typing import Annotated, Literal

from pydantic import ConfigDict, StringConstraints, model_validator

from podscale.config.fields import Section, conflict_error
from podscale.config.fields import placement_field as option  # all options here are of this class
from podscale.util import env

DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
"""DNS label (RFC 1123), the name of most Kubernetes objects."""
DNS_SUBDOMAIN_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_LABEL_KEY_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
_LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"

DnsLabel = Annotated[str, StringConstraints(pattern=DNS_LABEL_PATTERN, max_length=63)]
DnsSubdomain = Annotated[str, StringConstraints(pattern=DNS_SUBDOMAIN_PATTERN, max_length=253)]
LabelKey = Annotated[str, StringConstraints(pattern=_LABEL_KEY_PATTERN, max_length=317)]
LabelValue = Annotated[str, StringConstraints(pattern=_LABEL_VALUE_PATTERN, max_length=63)]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

RESERVED_LABELS = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/component",
    "podscale.dev/",
)
RESERVED_VARIABLES = (env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.MASTER_ADDR, env.MASTER_PORT)
RESERVED_PREFIXES = (env.PREFIX, "PET_")
"""Prefixes of environment variables that launchers and Podscale set in pods, besides those above."""
SETTABLE_VARIABLES = (env.WEB_RUNTIME,)
"""Variables with such a prefix that the user sets."""
RESERVED_PATHS = ("/", "/tmp", "/dev", "/dev/shm", "/proc", "/sys", "/etc", "/usr")


class VolumeSection(Section):
    """Further volume of every pod: its path and exactly one kind of volume."""

    path: str = option(..., "Mount path in the pods.", pattern=r"^/[^:]*$")
    claim: DnsSubdomain | None = option(None, "Name of a PersistentVolumeClaim.")
    bucket: str | None = option(
        None, "Name of a Cloud Storage bucket, mounted by the GCS FUSE driver of GKE (needs Workload Identity)."
    )
    secret: DnsSubdomain | None = option(None, "Name of a Secret; its keys become files.")
    config_map: DnsSubdomain | None = option(None, "Name of a ConfigMap; its keys become files.")
    empty_gib: float | None = option(None, "Size of an empty directory that is deleted with the pod, GiB.", gt=0)
    nfs: str | None = option(
        None, "NFS export, `server:/path`; restricted Pod Security forbids it.", pattern=r"^[^:/]+:/.*$"
    )
    read_only: bool = option(False, "Mount the volume read-only.")

    @property
    def kind(self) -> str:
        """Kind of the volume."""
        return next(name for name in VOLUME_KINDS if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _check_kind(self) -> "VolumeSection":
        kinds = [name for name in VOLUME_KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            problem = f"needs exactly one of {', '.join(VOLUME_KINDS)}, has {' and '.join(kinds) or 'none'}"
            raise conflict_error("path", problem, got=self.path)
        if self.path.rstrip("/") in {path.rstrip("/") for path in RESERVED_PATHS}:
            raise conflict_error(
                "path", "belongs to the container itself", got=self.path, hint="Mount it somewhere else."
            )
        return self


VOLUME_KINDS = ("claim", "bucket", "secret", "config_map", "empty_gib", "nfs")


class TolerationSection(Section):
    """Taint of nodes that the pods tolerate."""

    key: LabelKey | None = option(None, "Key of the taint; none = every taint.")
    operator: Literal["Exists", "Equal"] = option("Exists", "`Equal` compares the value too.")
    value: LabelValue | None = option(None, "Value of the taint, with Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = option(
        None, "Effect of the taint; none = every effect."
    )
    seconds: int | None = option(None, "With NoExecute: seconds that a pod stays on the node.", ge=0)

    @model_validator(mode="after")
    def _check_toleration(self) -> "TolerationSection":
        if (self.operator == "Equal") != (self.value is not None):
            raise conflict_error("value", "belongs to operator Equal, and only to it", got=self.value)
        if self.key is None and self.operator != "Exists":
            raise conflict_error("key", "a toleration of every taint has operator Exists", got=None)
        if self.seconds is not None and self.effect != "NoExecute":
            raise conflict_error("seconds", "needs effect NoExecute", got=self.seconds)
        return self


class ClusterSection(Section):
    """Placement of a run's pods on a cluster, and their settings."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # labels and variables are text, however they look

    namespace: DnsLabel | None = option(None, "Namespace; default: the current one of the context, or of the launcher.")
    context: str | None = option(None, "Context of the kubeconfig; default: the current one.", min_length=1)
    service_account: DnsSubdomain | None = option(
        None, "Service account of the pods, for access to storage; its token is not mounted."
    )
    workspace_claim: DnsSubdomain | None = option(
        None, "PersistentVolumeClaim mounted at run.workspace in every pod; ReadWriteMany, because many pods write."
    )
    volumes: tuple[VolumeSection, ...] = option(
        (), "More volumes: `path` and one of claim, bucket, secret, config_map, empty_gib, nfs."
    )
    metrics_tls_secret: DnsSubdomain | None = option(
        None,
        "Secret with `tls.crt` and `tls.key`, with which the pods serve metrics over HTTPS (in place of "
        "telemetry.tls_*).",
    )
    metrics_mutual_tls: bool = option(
        False, "Require client certificates of scrapers, signed by the authority `ca.crt` of that Secret."
    )
    metrics_token_secret: DnsSubdomain | None = option(None, "Secret whose `token` scrapers must send as bearer token.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = option(
        None, "Pull policy of the images; default: Kubernetes' own rule (Always for the tag latest)."
    )
    image_pull_secrets: tuple[DnsSubdomain, ...] = option((), "Secrets with the credentials of the image registry.")
    labels: dict[LabelKey, LabelValue] = option({}, "Further labels of jobs and pods.")
    annotations: dict[LabelKey, str] = option({}, "Further annotations of jobs and pods.")
    node_selector: dict[LabelKey, LabelValue] = option(
        {}, "Labels that nodes must have, besides those of the hardware."
    )
    tolerations: tuple[TolerationSection, ...] = option(
        (), "Taints of nodes to accept, besides those of the hardware: key, operator, value, effect, seconds."
    )
    env: dict[EnvName, str] = option({}, "Further environment variables of the containers.")
    spot: bool = option(False, "Run on Spot VMs of GKE: cheaper, but preempted at short notice.")
    reservation: DnsLabel | None = option(None, "Run on the machines of this Compute Engine reservation (GKE).")
    compute_class: DnsLabel | None = option(None, "Compute class of GKE that chooses or creates the nodes.")
    placement: Literal["any", "compact"] = option(
        "any", "`compact`: machines close to each other, by a GKE placement group with the name of the run."
    )
    local_ssd: bool = option(False, "Keep the shard cache on the node's Local SSD (GKE).")
    queue: DnsLabel | None = option(
        None,
        "LocalQueue of Kueue that admits the job (PyTorchJob and JAXJob if Kueue's configuration names them).",
    )
    priority_class: DnsSubdomain | None = option(None, "PriorityClass of the pods; Kueue orders its queue by it too.")
    topology: Literal["none", "preferred", "required"] = option(
        "none", "Placement of all pods within one domain of Kueue's topology."
    )
    topology_level: LabelKey | None = option(
        None, "Node label of that domain; default: cloud.google.com/gce-topology-block."
    )
    runtime_class: DnsSubdomain | None = option(None, "RuntimeClass of the pods (gvisor, nvidia ...).")
    security: Literal["restricted", "privileged"] | None = option(
        None,
        "Pod Security level that the pods meet: `restricted`, or `privileged` for TPUs and GPUDirect. Default: by the "
        "hardware.",
    )
    network: Literal["auto", "plain", "gpudirect"] = option(
        "auto",
        "`gpudirect`: TCPX, TCPXO or RDMA, by the machine (needs its driver and networks in the cluster). `auto`: "
        "gpudirect if security is privileged and whole machines that have it are requested.",
    )
    min_nodes: int | None = option(
        None,
        "Elastic training: continue with at least this many of launch.nodes when nodes are lost (PyTorchJob).",
        ge=1,
    )
    slices: int = option(1, "TPU slices of the topology in launch.hardware (multislice; JobSet).", ge=1)
    restarts: int = option(10, "Restarts of the job by its operator before the job fails.", ge=0)
    launcher_grace_minutes: float = option(
        20.0,
        "Time without a heartbeat of its pipeline's launcher after which a job saves and stops; 0 = never. Longer than "
        "a restart of the launcher, with the pull of its image and KFP's pause before a retry. Jobs of `podscale "
        "submit` have no launcher and are not stopped.",
        ge=0,
    )
    keep_hours: float | None = option(24.0, "Hours after its end at which a job is deleted; none = never.", ge=0)

    @model_validator(mode="after")
    def _check_names(self) -> "ClusterSection":
        for key, names in (("labels", self.labels), ("annotations", self.annotations)):
            for name in names:
                if name.startswith(RESERVED_LABELS):
                    raise conflict_error(key, "set by podscale itself", got=name, hint="Leave it out.")
        for name in self.env:
            is_reserved = name in RESERVED_VARIABLES or name.startswith(RESERVED_PREFIXES)
            if is_reserved and name not in SETTABLE_VARIABLES:
                raise conflict_error("env", "set by podscale or the launcher", got=name, hint="Leave it out.")
        paths = [volume.path.rstrip("/") for volume in self.volumes]
        if duplicate := next((path for path in paths if paths.count(path) > 1), None):
            raise conflict_error("volumes", "two volumes at one path", got=duplicate)
        return self

    @model_validator(mode="after")
    def _check_options(self) -> "ClusterSection":
        if self.metrics_mutual_tls and self.metrics_tls_secret is None:
            raise conflict_error(
                "metrics_mutual_tls", "client certificates need TLS", hint="Set metrics_tls_secret too."
            )
        if self.topology != "none" and self.queue is None:
            raise conflict_error(
                "topology",
                "only Kueue places pods by topology",
                got=self.topology,
                hint="Set queue to a LocalQueue of Kueue, or leave it out.",
            )
        if self.topology_level is not None and self.topology == "none":
            raise conflict_error("topology_level", "needs topology preferred or required", got=self.topology_level)
        if self.spot and self.reservation is not None:
            raise conflict_error(
                "spot", "machines of a reservation are no Spot VMs", hint="Choose spot or reservation."
            )
        if self.security == "restricted" and self.network == "gpudirect":
            raise conflict_error(
                "network",
                "needs host devices and paths, which restricted Pod Security forbids",
                got="gpudirect",
                hint="Set security: privileged and use a namespace that allows it, or network: plain.",
            )
        return self


class ResourcesSection(Section):
    """Resources that one pod of the pipeline requests, and may use at most; by default those of the hardware."""

    cpus: float = option(
        0.0,
        "CPU cores per pod; 0 = those of `launch.hardware`. On CPUs without it, each process requests 0.25 and may use "
        "4, and the shard stage may use 4 for each of `launch.shard_workers`.",
        ge=0,
    )
    memory_gib: float = option(
        0.0,
        "Memory per pod, GiB; 0 = that of `launch.hardware`. On CPUs each process requests 1 and may use 8; caches and "
        "shared memory are added.",
        ge=0,
    )
    accelerator: str | None = option(None, "Resource name of the accelerators, such as nvidia.com/gpu.")
    accelerators: int = option(0, "Accelerators per pod of training and evaluation.", ge=0)
    ephemeral_gib: float = option(
        0.0, "Space per pod for temporary files and logs, GiB; 0 = 8, plus the size of the shard cache.", ge=0
    )
    shm_gib: float = option(
        0.0, "Shared memory (/dev/shm) per pod, GiB, part of its memory; 0 = as much as loaders and NCCL need.", ge=0
    )

    @model_validator(mode="after")
    def _check_accelerator(self) -> "ResourcesSection":
        if self.accelerators and self.accelerator is None:
            raise conflict_error("accelerator", f"name the resource of the {self.accelerators} accelerators", got=None)
        return self

    @model_validator(mode="after")
    def _check_shared_memory(self) -> "ResourcesSection":
        if self.memory_gib and self.shm_gib >= self.memory_gib:
            raise conflict_error(
                "shm_gib",
                f"must be smaller than memory_gib={self.memory_gib:g}, of which it is a part",
                got=self.shm_gib,
            )
        return self


class LaunchSection(Section):
    backend: Literal["local", "pytorchjob", "jaxjob", "trainjob", "jobset", "auto"] = option(
        "local",
        "Launcher of the processes: this machine, or a kind of job on a cluster. `auto`: chosen by what the cluster "
        "has installed and the hardware needs.",
    )
    hardware: str | None = option(
        None,
        "Type of machine on a cluster, such as `nvidia-h100-80gb x8` (GPUs per pod), `nvidia-l4`, `tpu-v5e-4x4` or "
        "`cpu` (docs/reference/hardware.md); default: launch.resources.",
    )
    processes: int = option(0, "Training processes per node; 0 = one per GPU, or one without GPUs.", ge=0)
    nodes: int = option(1, "Nodes of the job.", ge=1)
    threads: int = option(0, "CPU threads per process; 0 = cores / processes.", ge=0)
    shard_workers: int = option(0, "Packing processes; 0 = one per core.", ge=0)
    shard_pods: int = option(1, "Pods that pack the shard set in parallel on a cluster.", ge=1)
    max_restarts: int = option(0, "Restarts from the newest checkpoint after a lost rank, per launch.", ge=0)
    grace_seconds: float = option(
        60.0, "Time for saving between a stop request and the kill of the processes, seconds.", gt=0
    )
    timeout_seconds: float = option(
        300.0, "Longest wait of a rank for its peers, seconds; then all ranks exit and name the missing one.", gt=0
    )
    hang_seconds: float = option(
        180.0,
        "Minimal time without a step that counts as a hang, seconds. If ten times the usual step is longer, that is "
        "the limit, up to launch.timeout_seconds. Evaluations, checkpoints and the first step do not count.",
        gt=0,
    )
    code: str | None = option(
        None,
        "Folder or package of your own code that travels with the run, for models, optimizers and augmentations named "
        "`python:MODULE:CALLABLE`: on the import path of every stage, also in pods and in predictions "
        "(docs/how-to/own-code.md).",
    )
    code_bundle: str | None = option(
        None, "That code as text, in the documents of pods; `podscale render`, `submit` and `compile` write it."
    )
    image: str = option(
        "auto",
        "Container image of the stages, for example REGISTRY/podscale-gpu:0.2.0. `auto`: podscale-base, podscale-gpu, "
        "podscale-tpu or podscale-gpu-jax, with the tag `latest`, by the engine and the accelerators.",
        min_length=1,
    )
    launcher_image: str = option(
        "podscale-tools:latest", "Container image of launchers, which start and watch jobs on a cluster.", min_length=1
    )
    retries: int = option(
        2,
        "Restarts of a failed stage in a pipeline on a cluster. A stage that runs as a job is submitted again that "
        "often if it fails or vanishes.",
        ge=0,
    )
    time_limit_hours: float = option(168.0, "Time limit of a stage on a cluster, hours, retries included.", gt=0)
    resources: ResourcesSection = ResourcesSection()
    cluster: ClusterSection = ClusterSection()

    @model_validator(mode="after")
    def _check_min_nodes(self) -> "LaunchSection":
        least = self.cluster.min_nodes
        if least is not None and least > self.nodes:
            raise conflict_error("cluster.min_nodes", f"more than launch.nodes={self.nodes}", got=least)
        return self
