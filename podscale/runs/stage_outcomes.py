"""Stage outcomes of a run directory, and reuse of stages that finished with the same inputs.

outcome.json has the outcome of each stage, stages.json the inputs of each finished stage. A run directory belongs to
one run document: another is refused.
"""

import errno
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from podscale.config import RunConfig, differences, dumps, load, result_values
from podscale.config.data import DataSection
from podscale.config.identity import Difference
from podscale.data.manifest import WHOLE_SHARD_SET, ShardPart
from podscale.errors import ExitCode, InputError, PodscaleError
from podscale.runs.directory import RunDirectory, dataset_directory, local_path
from podscale.runs.lease import Lease, LeaseLost, lease_wait_seconds
from podscale.runs.stage_inputs import is_same_inputs, stage_inputs
from podscale.runs.user_code import describe_code_change, find_archive
from podscale.util.files import write_atomically, write_json
from podscale.util.processes import SigtermReceived

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""
MAX_TERMINATION_BYTES = 4096
"""Maximal size of a container's termination message that Kubernetes keeps, bytes."""

StageName = Literal["shard", "train", "evaluate", "report", "export"]


@dataclass(frozen=True)
class StageOutcome:
    """Outcome of one stage; `seconds` are wall time."""

    stage: str
    exit_code: int
    error: str = ""
    seconds: float = 0.0
    ended: str = ""
    reused: bool = False
    """True if the stage was finished before; `seconds` are then those of the launch that did the work."""

    @property
    def is_done(self) -> bool:
        return self.exit_code == ExitCode.DONE


def write_outcome(path: Path, outcome: StageOutcome) -> None:
    """Write the outcome of one stage beside those of the others."""
    outcomes = read_outcomes(path)
    outcomes[outcome.stage] = outcome
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {name: asdict(entry) for name, entry in outcomes.items()})


def read_outcomes(path: Path) -> dict[str, StageOutcome]:
    """Return the recorded outcomes by stage; empty if there are none or the file is damaged."""
    try:
        return {name: StageOutcome(**entry) for name, entry in read_entries(path).items()}
    except TypeError:
        return {}


def read_entries(path: Path) -> dict[str, Any]:
    """Return the entries of a JSON file that has one for each stage; empty if there is none or the file is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def exit_code_and_message(error: BaseException) -> tuple[int, str]:
    if isinstance(error, PodscaleError):
        return int(error.exit_code), str(error)
    if isinstance(error, SigtermReceived):
        return int(ExitCode.PREEMPTED), str(error)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    return int(ExitCode.FAILED), f"{type(error).__name__}: {error}"


@dataclass
class StageRecording:
    """State of `record_stage`, set by its body."""

    reused_outcome: StageOutcome | None = None
    """Outcome of the launch that did the work; None: this one."""


@contextmanager
def record_stage(path: Path, stage: StageName, fence: Callable[[], None] = lambda: None) -> Iterator[StageRecording]:
    """Record the outcome of the block, also after an exception; `fence` raises LeaseLost after a takeover."""
    started = datetime.now(UTC)
    recording = StageRecording()

    def record(exit_code: int, error: str) -> None:
        now = datetime.now(UTC)
        if recording.reused_outcome is not None and exit_code == ExitCode.DONE:
            outcome = replace(recording.reused_outcome, reused=True, ended=now.isoformat())
        else:
            outcome = StageOutcome(stage, exit_code, error, (now - started).total_seconds(), now.isoformat())
        fence()
        write_outcome(path, outcome)

    try:
        yield recording
    except BaseException as error:
        with suppress(OSError, LeaseLost):  # a full disk must not hide the error that it caused
            record(*exit_code_and_message(error))
        raise
    record(int(ExitCode.DONE), "")


STAGES: tuple[StageName, ...] = get_args(StageName)[:-1]
"""Stages of every run, each of which can be a job of a cluster."""


def planned_stages(config: RunConfig) -> tuple[StageName, ...]:
    """Return the stages of a document's pipeline, in order."""
    return (*STAGES, "export") if config.export.formats else STAGES


def check_run_document(config: RunConfig) -> RunDirectory:
    """Return the run directory of this document; raises InputError if it holds a run with other `result` fields."""
    run = RunDirectory.for_config(config)
    if not run.config.exists():
        return run
    changed = differences(result_values(load(run.config)), result_values(config))
    if changed:
        listing = "\n".join(_describe_change(config, change) for change in changed)
        raise InputError(
            f"holds the run of another document. These options change the numbers and differ:\n{listing}\n",
            field=str(run.path),
            hint="Choose another name with --set run.id=..., or move the earlier run aside with --fresh, or go back to "
            f"the earlier values (they are in {run.config}).",
        )
    return run


def _describe_change(config: RunConfig, change: Difference) -> str:
    """Return the line of a changed option; below it, the files of the user's code that differ."""
    if change.option != "run.code":
        return f"  {change}"
    with suppress(InputError):
        find_archive(config)  # stored, so that the files can be compared
    files = describe_code_change(config.run.workspace, change)
    return f"  {change}" + (f"\n{files}" if files else "")


def prepare_run_directory(config: RunConfig) -> RunDirectory:
    """Check the run document, and create the run directory with the resolved document."""
    run = check_run_document(config).create()
    try:
        find_archive(config)
        launch = config.launch.model_copy(update={"code_bundle": None})  # the workspace has the code now
        write_atomically(run.config, dumps(config.model_copy(update={"launch": launch})))
    except OSError as error:
        raise InputError(f"cannot write the run directory: {error.strerror}", field=str(run.path)) from error
    return run


def move_run_aside(config: RunConfig) -> Path | None:
    """Move the run directory aside; return its new path, None if it was empty.

    The lease, which the caller holds, stays, so that a late writer of the earlier run finds another number in it.
    """
    run = RunDirectory.for_config(config)
    if all(path == run.lease for path in run.path.iterdir()):
        return None
    moved = run.path.with_name(f"{run.path.name}.{datetime.now(UTC):%Y%m%dT%H%M%S}")
    try:
        run.path.rename(moved)
        run.path.mkdir()
        (moved / run.lease.name).rename(run.lease)
    except OSError as error:
        raise InputError(f"cannot be moved aside: {error.strerror}", field=str(run.path)) from error
    return moved


def finished_outcome(config: RunConfig, stage: StageName, shard_set: str) -> StageOutcome | None:
    """Return the outcome of `stage` if it is done with the same inputs and its output exists; else None."""
    run = RunDirectory.for_config(config)
    outcome = read_outcomes(run.outcome).get(stage)
    if outcome is None or not outcome.is_done or not all(path.exists() for path in _output_files(config, stage)):
        return None
    recorded = read_entries(run.stage_inputs).get(stage)
    return outcome if is_same_inputs(recorded, stage_inputs(config, stage, shard_set)) else None


def record_finished(config: RunConfig, stage: StageName, shard_set: str) -> None:
    """Record the inputs of `stage`, for `finished_outcome`."""
    run = RunDirectory.for_config(config)
    write_json(run.stage_inputs, {**read_entries(run.stage_inputs), stage: stage_inputs(config, stage, shard_set)})


def discard_outcomes(config: RunConfig, stage: StageName) -> None:
    """Remove the outcomes of `stage` and of the stages after it."""
    run = RunDirectory.for_config(config)
    stages: tuple[StageName, ...] = get_args(StageName)
    stale = (stage,) if stage == "report" else stages[stages.index(stage) :]  # nothing depends on the report
    write_json(run.outcome, {name: entry for name, entry in read_entries(run.outcome).items() if name not in stale})


@dataclass
class StageRun:
    """One stage of a run directory while its lease is held."""

    run: RunDirectory
    lease: Lease
    finished: StageOutcome | None = None
    """Outcome of an earlier launch that finished the stage with the same inputs; None: the stage has to run."""
    outcome: StageOutcome = field(init=False)
    """Outcome, set once the stage is done."""


@contextmanager
def stage_once(config: RunConfig, stage: StageName, shard_set: str) -> Iterator[StageRun]:
    """Enter a run directory for one stage, under its lease, and record the outcome of the stage.

    The body does the work only if `finished` is None. Raises InputError if the directory holds the run of another
    document or cannot be written.
    """
    run = check_run_document(config).create()
    wait_seconds = lease_wait_seconds(config.launch.grace_seconds)
    with Lease.hold(run.lease, wait_seconds=wait_seconds) as lease, disk_errors(run.path):
        prepare_run_directory(config)
        _adopt_shard_outcome(config, run)
        stage_run = StageRun(run, lease)
        # The inner `disk_errors` converts an error before it is recorded.
        with record_stage(run.outcome, stage, lease.check) as recording, disk_errors(run.path):
            stage_run.finished = recording.reused_outcome = finished_outcome(config, stage, shard_set)
            if stage_run.finished is None:
                discard_outcomes(config, stage)
            yield stage_run
        record_finished(config, stage, shard_set)
        stage_run.outcome = read_outcomes(run.outcome)[stage]


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Raise InputError with a hint if the disk is full or cannot be written."""
    try:
        yield
    except OSError as error:
        advice = {
            errno.ENOSPC: "Free some space or choose another run.workspace",
            errno.EDQUOT: "Free some of your quota or choose another run.workspace",
            errno.EROFS: "Choose a run.workspace that can be written",
            errno.EACCES: "Make it writable or choose another run.workspace",
        }.get(error.errno or 0)
        if advice is None:
            raise
        raise InputError(
            str(error.strerror),
            field=str(error.filename or target),
            hint=f"{advice}, then run the same command again: finished stages are kept.",
        ) from error


def shard_outcome_path(workspace: str, data: DataSection, part: ShardPart = WHOLE_SHARD_SET) -> Path:
    """Return the outcome file of the shard stage, beside the shard set."""
    suffix = f".part-{part.index}-of-{part.count}" if part.count > 1 else ""
    return Path(f"{local_path(dataset_directory(workspace, data))}{suffix}.outcome.json")


def _adopt_shard_outcome(config: RunConfig, run: RunDirectory) -> None:
    """Copy the shard stage's outcome into the run directory."""
    outcome = read_outcomes(shard_outcome_path(config.run.workspace, config.data)).get("shard")
    if outcome is not None and read_outcomes(run.outcome).get("shard") != outcome:
        write_outcome(run.outcome, outcome)


def _output_files(config: RunConfig, stage: StageName) -> list[Path]:
    run = RunDirectory.for_config(config)
    return {
        "shard": [],
        "train": [run.model / "model.safetensors", run.model / "model.json"],
        "evaluate": [run.evaluation, run.predictions],
        "report": [run.report],
        "export": [run.exports / name for name in config.export.file_names],
    }[stage]
