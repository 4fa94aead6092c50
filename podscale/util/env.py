"""Environment variables between launcher, workers, stages and images.

docs/reference/environment.md is generated from `VARIABLES`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

from podscale.errors import InputError

PREFIX: Final = "PODSCALE_"

# Contract of a worker, on top of torchrun's variables, which are below.
CONFIG: Final = "PODSCALE_CONFIG"
STAGE: Final = "PODSCALE_STAGE"
SHARD_SET: Final = "PODSCALE_SHARD_SET"
RANK_DIR: Final = "PODSCALE_RANK_DIR"
LOG_DIR: Final = "PODSCALE_LOG_DIR"
STORE: Final = "PODSCALE_STORE"
SLICE: Final = "PODSCALE_SLICE"
SLICES: Final = "PODSCALE_SLICES"
LIFE_BEGAN: Final = "PODSCALE_LIFE_BEGAN"
STARTUP: Final = "PODSCALE_STARTUP"
SUPERVISOR: Final = "PODSCALE_SUPERVISOR"
DECODED_CACHE: Final = "PODSCALE_DECODED_CACHE"
TRACKERS: Final = "PODSCALE_TRACKERS"

# Lease of the run directory, inherited by every process of a launch.
LEASE: Final = "PODSCALE_LEASE"
FENCE: Final = "PODSCALE_FENCE"
LEASE_PATIENCE: Final = "PODSCALE_LEASE_PATIENCE"

# From the command line or a pipeline to a stage.
COMMAND: Final = "PODSCALE_COMMAND"
LAUNCHER_PID: Final = "PODSCALE_LAUNCHER_PID"
LIFELINE: Final = "PODSCALE_LIFELINE"
STAGE_FILE: Final = "PODSCALE_STAGE_FILE"
PROGRESS_FILE: Final = "PODSCALE_PROGRESS_FILE"
TELEMETRY: Final = "PODSCALE_TELEMETRY"
SHARD_WORKERS: Final = "PODSCALE_SHARD_WORKERS"

# From a manifest or an image to the pod.
RUN_DOCUMENT: Final = "PODSCALE_RUN_DOCUMENT"
SLICE_NODES: Final = "PODSCALE_SLICE_NODES"
TERMINATION_LOG: Final = "PODSCALE_TERMINATION_LOG"
LAUNCHER_GRACE: Final = "PODSCALE_LAUNCHER_GRACE"
JOB_START: Final = "PODSCALE_JOB_START"
STUDY: Final = "PODSCALE_STUDY"
TRIAL: Final = "PODSCALE_TRIAL"
IMAGE: Final = "PODSCALE_IMAGE"
COMMIT: Final = "PODSCALE_COMMIT"

# From the user.
IGNORE_MEMORY: Final = "PODSCALE_IGNORE_MEMORY"
KFP_TOKEN: Final = "PODSCALE_KFP_TOKEN"
KFP_COOKIES: Final = "PODSCALE_KFP_COOKIES"
WEB_RUNTIME: Final = "PODSCALE_WEB_RUNTIME"
MODEL_REGISTRY_TOKEN: Final = "PODSCALE_MODEL_REGISTRY_TOKEN"

# Names of PyTorch, OpenMP and Kubeflow, which these programs read or write too.
RANK: Final = "RANK"
WORLD_SIZE: Final = "WORLD_SIZE"
LOCAL_RANK: Final = "LOCAL_RANK"
LOCAL_WORLD_SIZE: Final = "LOCAL_WORLD_SIZE"
GROUP_RANK: Final = "GROUP_RANK"
MASTER_ADDR: Final = "MASTER_ADDR"
MASTER_PORT: Final = "MASTER_PORT"
TORCHELASTIC_RESTART_COUNT: Final = "TORCHELASTIC_RESTART_COUNT"
TORCH_ELASTIC_SHUTDOWN_TIMEOUT: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
OMP_NUM_THREADS: Final = "OMP_NUM_THREADS"
KF_PIPELINES_SA_TOKEN_PATH: Final = "KF_PIPELINES_SA_TOKEN_PATH"


def cache_directory(name: str) -> Path:
    """Return the folder `name` in the user's cache of Podscale, which may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podscale" / name


Kind = Literal[
    "number",
    "process id",
    "seconds",
    "path",
    "path or URL",
    "host",
    "host:port",
    "JSON",
    "YAML",
    "lines",
    "shell words",
    "name",
    "commit",
    "text",
    "any text",
    "`train` or `evaluate`",
]
"""Kind of a value. `read_number` reads a number or a process id, `read_seconds` seconds, and `read_path` a path."""


class Variable(NamedTuple):
    """One environment variable, with the kind of its value, its writer and its reader."""

    name: str
    kind: Kind
    writer: str
    reader: str
    meaning: str


SUPERVISOR_OF = "supervisor of the pod"
FORK_LAUNCHER = "fork launcher of the pod"
ANY_WORKER = "workers"

VARIABLES: Final = (
    Variable(CONFIG, "JSON", SUPERVISOR_OF, "workers, trackers", "Resolved run document."),
    Variable(STAGE, "`train` or `evaluate`", SUPERVISOR_OF, ANY_WORKER, "Stage that the workers run."),
    Variable(SHARD_SET, "path or URL", SUPERVISOR_OF, ANY_WORKER, "Location of the shard set."),
    Variable(
        RANK_DIR,
        "path",
        SUPERVISOR_OF,
        "workers; process cleanup",
        "Directory of this launch, local to the pod: rank-<k>.json, metrics-<k>.prom, outcome-<k>.json. Processes that "
        "have it in their environment belong to the launch.",
    ),
    Variable(LOG_DIR, "path", SUPERVISOR_OF, ANY_WORKER, "Directory of rank-<k>.log; absent: no redirection."),
    Variable(
        STORE,
        "host:port",
        f"{FORK_LAUNCHER}, ranks of a benchmark",
        ANY_WORKER,
        "Key-value store of the rendezvous of all ranks.",
    ),
    Variable(
        SLICE,
        "number",
        f"JobSet manifest, {FORK_LAUNCHER}",
        "supervisor, workers",
        "Index of this pod's TPU slice, from 0.",
    ),
    Variable(SLICES, "number", FORK_LAUNCHER, ANY_WORKER, "TPU slices of the job; absent: one."),
    Variable(
        LIFE_BEGAN,
        "seconds",
        SUPERVISOR_OF,
        ANY_WORKER,
        "Start of this launch on the machine's monotonic clock; absent: the start of the process counts.",
    ),
    Variable(
        STARTUP,
        "JSON",
        "supervisor, fork launcher, torchrun",
        ANY_WORKER,
        "Seconds of the parts of this launch's start that have ended, by name; absent: none.",
    ),
    Variable(
        SUPERVISOR,
        "process id",
        SUPERVISOR_OF,
        "workers, trackers",
        "The supervisor. A process that no longer has it among its ancestors exits.",
    ),
    Variable(
        DECODED_CACHE,
        "path",
        SUPERVISOR_OF,
        ANY_WORKER,
        "Shared memory in which the workers of the pod keep decoded images; absent: each worker has its own cache.",
    ),
    Variable(
        TRACKERS, "path", SUPERVISOR_OF, "process cleanup", "Rank directory of the launch that a tracker belongs to."
    ),
    Variable(
        LEASE,
        "path",
        "supervisor, holder of the lease",
        "stages, rank 0",
        "Lease file of the run directory.",
    ),
    Variable(
        FENCE,
        "number",
        "supervisor, holder of the lease, rank 0",
        "stages, workers",
        "Fencing number of the lease; absent: rank 0 takes the lease.",
    ),
    Variable(
        LEASE_PATIENCE, "seconds", SUPERVISOR_OF, "rank 0", "Longest wait for the lease when rank 0 has to take it."
    ),
    Variable(
        COMMAND,
        "shell words",
        "command line",
        "stages, study, benchmarks",
        "Command that the user typed, for environment.json and result pages; absent if a cluster started the stage.",
    ),
    Variable(
        LAUNCHER_PID,
        "process id",
        "pipeline on this machine",
        "stages",
        "The `podscale run` that started the stage. The stage exits with it.",
    ),
    Variable(
        LIFELINE,
        "path",
        "pipeline on this machine",
        "stages in containers",
        "File that the launcher keeps locked while it runs, because a process id means nothing in a container.",
    ),
    Variable(
        STAGE_FILE,
        "path",
        "pipeline on this machine",
        "stages",
        "File in which the running stage writes its name and process id. A failed stage writes its error beside it.",
    ),
    Variable(
        PROGRESS_FILE,
        "path",
        "pipeline on this machine, supervisor",
        "stages, rank 0",
        "Newest progress report.",
    ),
    Variable(
        TELEMETRY,
        "JSON",
        "pipelines",
        "shard stage",
        "Run, telemetry section and endpoint file of a stage that is not given the whole document.",
    ),
    Variable(
        SHARD_WORKERS,
        "number",
        "pipelines",
        "shard stage",
        "Packing processes; absent or 0: one per core. Not an input of the KFP component, because it does not "
        "change the shards.",
    ),
    Variable(RUN_DOCUMENT, "YAML", "rendered manifest", "stages, live view", "Run document of a pod, inline."),
    Variable(SLICE_NODES, "number", "JobSet manifest", "supervisor", "Pods of each TPU slice."),
    Variable(
        LAUNCHER_GRACE,
        "seconds",
        "manifest of a pipeline's job",
        "supervisor",
        "Time without a heartbeat of the pipeline's launcher after which the job saves and stops; absent: never.",
    ),
    Variable(
        TERMINATION_LOG,
        "path",
        "rendered manifest, pipeline task",
        "stages",
        "Termination message, shown in the pod's status.",
    ),
    Variable(
        JOB_START,
        "path",
        "rendered manifest",
        "rank 0",
        "Start of the job's pods, which `podscale submit` writes into an annotation of the leading pod.",
    ),
    Variable(STUDY, "JSON", "Experiment of Katib", "trial of a study", "Study document, with the run document inside."),
    Variable(TRIAL, "lines", "Experiment of Katib", "trial of a study", "Parameters that Katib chose, as name=value."),
    Variable(IMAGE, "name", "image", "`podscale doctor`, preflight checks", "Image that this process runs in."),
    Variable(COMMIT, "commit", "image", "stages", "Commit of the source in the image, for environment.json."),
    Variable(
        IGNORE_MEMORY,
        "any text",
        "user",
        "`podscale run`, stages",
        "Start a training on CPUs even if its estimated memory is not free.",
    ),
    Variable(KFP_TOKEN, "text", "user", "`podscale pipeline`", "Bearer token of a Kubeflow Pipelines backend."),
    Variable(
        KFP_COOKIES, "text", "user", "`podscale pipeline`", "Cookies of a browser that is logged in to the backend."
    ),
    Variable(
        WEB_RUNTIME,
        "path",
        "user",
        "export to HTML",
        "Archive of the npm package onnxruntime-web, for a page without npm or a network.",
    ),
    Variable(
        MODEL_REGISTRY_TOKEN,
        "text",
        "user",
        "export stage",
        "Bearer token of the Kubeflow Model Registry; absent: the file that KF_PIPELINES_SA_TOKEN_PATH names.",
    ),
)

RANK_LAUNCHERS = "fork launcher, torchrun, benchmarks"
TORCHRUN = "torchrun, benchmarks"

OTHER_VARIABLES: Final = (
    Variable(RANK, "number", RANK_LAUNCHERS, ANY_WORKER, "Number of the rank in the run, from 0."),
    Variable(WORLD_SIZE, "number", RANK_LAUNCHERS, ANY_WORKER, "Ranks of the run; absent: a single process."),
    Variable(LOCAL_RANK, "number", RANK_LAUNCHERS, ANY_WORKER, "Number of the rank in its pod, from 0."),
    Variable(LOCAL_WORLD_SIZE, "number", RANK_LAUNCHERS, ANY_WORKER, "Ranks of the pod."),
    Variable(GROUP_RANK, "number", RANK_LAUNCHERS, ANY_WORKER, "Number of the pod; absent: RANK by LOCAL_WORLD_SIZE."),
    Variable(MASTER_ADDR, "host", TORCHRUN, ANY_WORKER, "Host of torchrun's own store, in place of PODSCALE_STORE."),
    Variable(MASTER_PORT, "number", TORCHRUN, ANY_WORKER, "Port of that store."),
    Variable(
        TORCHELASTIC_RESTART_COUNT,
        "number",
        "torchrun",
        ANY_WORKER,
        "Restarts of the ranks by torchrun; after one, the clock of the start begins with the process.",
    ),
    Variable(
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT,
        "number",
        SUPERVISOR_OF,
        "torchrun",
        "Seconds that torchrun waits for the ranks before it kills them; longer than `launch.grace_seconds`.",
    ),
    Variable(
        OMP_NUM_THREADS,
        "number",
        f"{SUPERVISOR_OF}, user",
        "workers, OpenMP, the prediction server",
        "CPU threads of each rank for computation.",
    ),
    Variable(
        KF_PIPELINES_SA_TOKEN_PATH,
        "path",
        "user, Kubeflow",
        "`podscale pipeline`, export stage",
        "File with a bearer token, as Kubeflow's own clients read it.",
    ),
)
"""Variables of other programs, by names that are not ours."""


def number(name: str, text: str) -> int:
    """Return a variable's value as an integer; raises InputError for other text."""
    try:
        return int(text)
    except ValueError:
        raise InputError("not a whole number", field=name, got=text) from None


def read_number(name: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return a variable as an integer; None if it is absent or empty."""
    text = environment.get(name)
    return number(name, text) if text else None


def read_seconds(name: str, environment: Mapping[str, str] = os.environ) -> float | None:
    """Return a variable as seconds; None if it is absent or empty."""
    text = environment.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise InputError("not a number of seconds", field=name, got=text) from None


def read_path(name: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return a variable as a path; None if it is absent or empty."""
    text = environment.get(name)
    return Path(text) if text else None


def require_text(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a variable that a process needs. Raises InputError if it is absent or empty."""
    if text := environment.get(name):
        return text
    raise InputError("missing", field=name, hint="Start the process by a command of Podscale, which sets it.")


def require_number(name: str, environment: Mapping[str, str] = os.environ) -> int:
    """Return a variable that a process needs, as a number. Raises InputError if it is absent, empty or no number."""
    return number(name, require_text(name, environment))


def require_path(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return a variable that a process needs, as a path. Raises InputError if it is absent or empty."""
    return Path(require_text(name, environment))
