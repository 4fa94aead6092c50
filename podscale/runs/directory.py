"""Paths of a workspace: <workspace>/datasets/<fingerprint>, <workspace>/runs/<id>, <workspace>/programs."""

from dataclasses import dataclass
from pathlib import Path

from podscale.config import RunConfig, data_fingerprint
from podscale.config.data import DataSection
from podscale.errors import InputError
from podscale.util.locations import Location


def local_path(location: str) -> Path:
    """Return the path of a path or file:// URL; raises InputError for other URLs, which cannot lock and rename."""
    path = Location.parse(location).local_path
    if path is None:
        raise InputError(
            "a run directory needs a local or mounted file system",
            field="run.workspace",
            got=location,
            hint="Mount the bucket (gcsfuse, PVC) and give its path: only data.source and shard sets may be URLs of an "
            "object store.",
        )
    return path


def dataset_directory(workspace: str, data: DataSection) -> str:
    return str(Location.parse(workspace).join("datasets", data_fingerprint(data)))


def programs_directory(workspace: str) -> Path:
    """Return the directory of compiled JAX programs, shared by launches and runs (see podscale.jax.program_cache)."""
    return local_path(workspace) / "programs"


class RunFile:
    """Descriptor of the path of a file in a run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDirectory", owner: type["RunDirectory"]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run's files."""

    path: Path

    config = RunFile("config.yaml")
    """Resolved run document."""
    environment = RunFile("environment.json")
    """Versions, devices and command line of the newest launch."""
    metrics = RunFile("metrics.jsonl")
    """One JSON line per logged step, evaluation and event."""
    mlperf = RunFile("mlperf.log")
    tensorboard = RunFile("tensorboard")
    trackers = RunFile("trackers")
    """Record of what was sent to experiment trackers (see podscale.telemetry.trackers.base)."""
    endpoint = RunFile("metrics.url")
    """URL of the metrics endpoint, while it is served."""
    telemetry = RunFile("telemetry.json")
    """Last metric values of each stage, from its leading pod."""
    outcome = RunFile("outcome.json")
    """Outcomes of each stage's newest launch."""
    stage_inputs = RunFile("stages.json")
    """Inputs of finished stages (see podscale.runs.stage_inputs)."""
    all_reduce = RunFile("all_reduce.json")
    """Measurements and choice of `all_reduce.algorithm: auto`, kept over restarts."""
    fused_kernels = RunFile("fused_kernels.json")
    """Measurements and choice of `fused_kernels: auto`, kept over restarts."""
    checkpoints = RunFile("checkpoints")
    model = RunFile("model")
    """Final model: model.safetensors, model.json, README.md (the model card)."""
    predictions = RunFile("predictions.safetensors")
    """One row per validation sample (see podscale.runs.predictions)."""
    predicted = RunFile("predicted")
    """Predictions of jobs: a folder of parts and their rows for each (see podscale.kubernetes.predict_job)."""
    evaluation = RunFile("evaluation.json")
    ensemble = RunFile("ensemble")
    """Predictions of models evaluated together, and `mean`, the model of their mean weights."""
    exports = RunFile("export")
    """Exported files of the model, each with the report of its check."""
    report = RunFile("report.html")
    hang_stacks = RunFile("hang")
    """Stack of each rank when the run last hung."""
    goodput = RunFile(".heartbeat")
    """Wall time of the run by cause, over all launches (see podscale.telemetry.goodput)."""
    lease = RunFile(".lease")
    launcher = RunFile("launcher.json")
    """Attempts of a pipeline's launcher at each stage (see podscale.stages.pipeline_launcher)."""
    launcher_heartbeat = RunFile(".launcher-heartbeat")
    job_start = RunFile(".job-start")
    """Start of the training job's pods, written by a pipeline's launcher (see podscale.runs.job_start)."""
    launcher_silence = RunFile(".launcher-silence")
    """Time for which the heartbeat of the pipeline's launcher did not change (see podscale.runs.launcher_heartbeat)."""

    @classmethod
    def for_config(cls, config: RunConfig) -> "RunDirectory":
        return cls(local_path(config.run.workspace) / "runs" / config.run.id)

    def create(self) -> "RunDirectory":
        """Create the directory; raises InputError if that fails."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the run directory: {error.strerror}", field=str(self.path)) from error
        return self
