"""Results of the Python API: the directory of a run, and what its finished stages left there."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from podscale.config import RunConfig
from podscale.config import load as load_file
from podscale.errors import InputError
from podscale.runs import RunDirectory, StageOutcome
from podscale.telemetry.events import filter_replays, read_records

if TYPE_CHECKING:
    from podscale.evaluation.evaluation_json import Evaluation

RecordKind = Literal["step", "evaluation", "event"]
"""Kind of a record of metrics.jsonl."""


@dataclass(frozen=True)
class Run:
    """Run of a document on this machine. Its results are read from the run directory on each access."""

    config: RunConfig

    @classmethod
    def open(cls, directory: str | PathLike[str]) -> "Run":
        """Open the directory of a run. Raises InputError if it has no run document."""
        path = Path(fspath(directory))
        document = RunDirectory(path).config
        if not document.is_file():
            raise InputError(
                "there is no run here", field=str(path), hint="Name the directory of a run, <workspace>/runs/<id>."
            )
        return cls(
            load_file(document, {"run": {"workspace": str(path.resolve().parents[1]), "id": path.resolve().name}})
        )

    @property
    def id(self) -> str:
        """Name of the run, `run.id`."""
        return self.config.run.id

    @property
    def directory(self) -> Path:
        """Directory of the run, `<workspace>/runs/<id>`."""
        return self._files.path

    @property
    def model(self) -> Path:
        """Directory of the trained model. Raises InputError if there is none yet."""
        return self._existing(self._files.model, "trained", "podscale.train")

    @property
    def report(self) -> Path:
        """Path of report.html. Raises InputError if there is none yet."""
        return self._existing(self._files.report, "reported", "podscale.write_report")

    @property
    def evaluation(self) -> "Evaluation":
        """Scores of the newest evaluation. Raises InputError if there is none yet."""
        from podscale.evaluation.evaluation_json import read_evaluation

        return read_evaluation(self._existing(self._files.evaluation, "evaluated", "podscale.evaluate"))

    @property
    def outcomes(self) -> Mapping[str, StageOutcome]:
        """Outcome of every stage that ran, by stage: exit code, error, seconds, and whether it was finished before."""
        from podscale.stages.local import run_outcomes

        return run_outcomes(self.config)

    def metrics(self, kind: RecordKind | None = None) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl, oldest first, of one kind or of all.

        A record is a dict with `time` (unix seconds) and `kind`. A `step` has `step`, `epoch`, `loss`, `learning_rate`
        and `images_per_second`; an `evaluation` has `step`, `epoch`, `top1`, `top5` and `loss`. Steps that a restart
        repeated occur once.
        """
        return select_records(filter_replays(read_records(self._files.metrics)), kind)

    @property
    def _files(self) -> RunDirectory:
        return RunDirectory.for_config(self.config)

    def _existing(self, path: Path, done: str, call: str) -> Path:
        if not path.exists():
            raise InputError(f"the run is not {done} yet", field=str(path), hint=f"Call {call} first.")
        return path

    def __str__(self) -> str:
        return f"run {self.id} in {self.directory}"


def select_records(records: list[dict[str, Any]], kind: RecordKind | None) -> list[dict[str, Any]]:
    """Return the records of one kind; None: all."""
    return records if kind is None else [record for record in records if record["kind"] == kind]
