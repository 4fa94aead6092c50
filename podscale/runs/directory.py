"""Paths of a workspace: <workspace>/datasets/<fingerprint>, <workspace>/runs/<id>, <workspace>/programs."""

from dataclasses import dataclass
from pathlib import Path

from podscale.config import RunConfig, data_fingerprint
from podscale.config.data import DataSection
from podscale.errors import InputError
from podscale.util.locations import Location


def local_path(location: str) -> Path:
    """Return the path of a local directory.

    Raises InputError for a remote one: a run directory needs a file system that can lock and rename.
    """
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
    """Location of the shard set of a data section."""
    return str(Location.parse(workspace).join("datasets", data_fingerprint(data)))


def programs_directory(workspace: str) -> Path:
    """Compiled programs of the JAX engine, shared by launches and runs (see podscale.jax.program_cache)."""
    return local_path(workspace) / "programs"


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run, by name. Nothing is created before `create`."""

    path: Path

    @classmethod
    def for_config(cls, config: RunConfig) -> "RunDirectory":
        return cls(local_path(config.run.workspace) / "runs" / config.run.id)

    def create(self) -> "RunDirectory":
        """Create the directory; raises InputError if it cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the run directory: {error.strerror}", field=str(self.path)) from error
        return self

    @property
    def config(self) -> Path:
        """The resolved run document."""
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        """Versions, devices and command line of the newest launch."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per logged step, evaluation and event."""
        return self.path / "metrics.jsonl"

    @property
    def mlperf(self) -> Path:
        """MLPerf log, if the document asks for it (see podscale.telemetry.mlperf_log)."""
        return self.path / "mlperf.log"

    @property
    def tensorboard(self) -> Path:
        """Event files, if the document asks for them."""
        return self.path / "tensorboard"

    @property
    def trackers(self) -> Path:
        """Record of what was sent to experiment trackers (see podscale.telemetry.trackers.base)."""
        return self.path / "trackers"

    @property
    def endpoint(self) -> Path:
        """The URL of the metrics endpoint, while one is served."""
        return self.path / "metrics.url"

    @property
    def telemetry(self) -> Path:
        """The last values of the metrics of each stage, as the pod that led it knew them."""
        return self.path / "telemetry.json"

    @property
    def outcome(self) -> Path:
        """Outcomes of each stage's newest launch."""
        return self.path / "outcome.json"

    @property
    def all_reduce(self) -> Path:
        """Measurements and choice of `all_reduce.algorithm: auto`, kept over restarts."""
        return self.path / "all_reduce.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The final model: model.safetensors, model.json, README.md (the model card)."""
        return self.path / "model"

    @property
    def predictions(self) -> Path:
        """One row per validation sample (see podscale.runs.predictions)."""
        return self.path / "predictions.safetensors"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def ensemble(self) -> Path:
        """What models that were evaluated together said each (see podscale.runs.predictions), and `mean`, the model of
        their mean weights."""
        return self.path / "ensemble"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def hang_stacks(self) -> Path:
        """Stack of each rank when the run last hung."""
        return self.path / "hang"

    @property
    def goodput(self) -> Path:
        """Wall time of the run by cause, over all launches (see podscale.telemetry.goodput)."""
        return self.path / ".heartbeat"

    @property
    def lease(self) -> Path:
        return self.path / ".lease"
