"""Attempts of a pipeline's launcher at a stage, in `launcher.json` of the run directory.

The record shares launch.retries between the launcher, which submits a failed job again, and Kubeflow Pipelines, which
starts a failed launcher again: both count the failures of one run of the pipeline. It also shows the exit handler
whether the launcher ended by itself or was killed.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from podscale.runs.directory import RunDirectory
from podscale.util.files import write_json

LauncherState = Literal["running", "done", "failed"]


@dataclass(frozen=True)
class LauncherRecord:
    """Attempts at one stage in one run of the pipeline.

    Args:
        pipeline: Run of the pipeline, as `podscale.kubernetes.pipeline_run` identifies it; "" if unknown.
        state: `running` until the launcher ends by itself; a killed launcher leaves it so.
        job_failures: Jobs that failed or vanished.
        error: Error of the newest failure.
    """

    pipeline: str
    state: LauncherState = "running"
    job_failures: int = 0
    exit_code: int = 0
    error: str = ""

    def with_failure(self, exit_code: int, error: str) -> "LauncherRecord":
        return replace(self, job_failures=self.job_failures + 1, exit_code=exit_code, error=error)


def read_launcher_record(run: RunDirectory, stage: str) -> LauncherRecord | None:
    """Return the newest launcher's record of a stage; None if no launcher has run it."""
    with suppress(KeyError, TypeError):
        return LauncherRecord(**_read_records(run)[stage])
    return None


def write_launcher_record(run: RunDirectory, stage: str, record: LauncherRecord) -> None:
    """Write the record. A volume that cannot be written makes the count of retries less exact, no more."""
    with suppress(OSError):
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(run.launcher, {**_read_records(run), stage: asdict(record)})


def begin_attempt(run: RunDirectory, stage: str, pipeline: str) -> LauncherRecord:
    """Record that a launcher works on the stage; earlier failures count if the same run of the pipeline had them."""
    earlier = read_launcher_record(run, stage)
    same_pipeline = earlier is not None and pipeline != "" and earlier.pipeline == pipeline
    record = replace(earlier, state="running") if earlier is not None and same_pipeline else LauncherRecord(pipeline)
    write_launcher_record(run, stage, record)
    return record


def _read_records(run: RunDirectory) -> dict[str, dict[str, Any]]:
    try:
        records = json.loads(run.launcher.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return records if isinstance(records, dict) else {}
