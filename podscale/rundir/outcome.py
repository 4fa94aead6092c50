"""outcome.json: how each stage of a run ended, for launchers, the exit handler and people."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from podscale.errors import ExitCode, PodscaleError
from podscale.rundir.lease import LeaseLost
from podscale.util.files import write_json
from podscale.util.processes import SigtermReceived

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""

StageName = Literal["shard", "train", "evaluate", "report"]


@dataclass(frozen=True)
class StageOutcome:
    """One stage's end: its exit code, the error as shown to people (empty when done) and wall seconds."""

    stage: str
    exit_code: int
    error: str = ""
    seconds: float = 0.0
    ended: str = ""
    reused: bool = False
    """True where the stage was finished before and nothing had to be done; `seconds` are then those of the work."""

    @property
    def is_done(self) -> bool:
        return self.exit_code == ExitCode.DONE


def write_outcome(path: Path, outcome: StageOutcome) -> None:
    """Records `outcome` beside those of the other stages, which are kept."""
    outcomes = read_outcomes(path)
    outcomes[outcome.stage] = outcome
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {name: asdict(entry) for name, entry in outcomes.items()})


def read_outcomes(path: Path) -> dict[str, StageOutcome]:
    """The recorded outcomes by stage; empty where there are none or the file is damaged."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {name: StageOutcome(**entry) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def exit_code_and_message(error: BaseException) -> tuple[int, str]:
    """Exit code and text for people of what ended a stage."""
    if isinstance(error, PodscaleError):
        return int(error.exit_code), str(error)
    if isinstance(error, SigtermReceived):
        return int(ExitCode.PREEMPTED), str(error)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    return int(ExitCode.FAILED), f"{type(error).__name__}: {error}"


@dataclass
class StageRecording:
    """What a stage tells about itself while it is recorded."""

    reused_outcome: StageOutcome | None = None
    """Set where nothing had to be done: the outcome of the launch that did the work."""


@contextmanager
def record_stage(path: Path, stage: StageName, fence: Callable[[], None] = lambda: None) -> Iterator[StageRecording]:
    """Runs one stage and records its outcome whatever happens; the exception goes on to the caller.

    fence: raises LeaseLost where a newer launch has taken over, whose record this is now.
    """
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
