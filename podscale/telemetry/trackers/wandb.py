"""Weights & Biases tracker, by the package wandb, whose own process sends the points and retries during outages.

A resumed run keeps its id. The horizontal axis is the metric `step`, because wandb's own step counts points.
"""

import os
from typing import Any

from podscale.config import RunConfig, result_values
from podscale.errors import ExitCode
from podscale.runs import RunDirectory
from podscale.telemetry.events import EventRecord
from podscale.telemetry.trackers.base import DEFAULT_PROJECT, LaunchExit, PointBuilder, SentPoints, new_run_name


class Wandb:
    """Tracker for Weights & Biases; its files go to <run>/wandb unless WANDB_DIR is set."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        import wandb

        section = config.telemetry.wandb
        self._sent = SentPoints.for_run(run, "wandb")
        self._point_builder = PointBuilder()
        self._run: Any = wandb.init(
            project=section.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            entity=section.entity,
            id=os.environ.get("WANDB_RUN_ID") or self._sent.id or new_run_name(config),
            name=os.environ.get("WANDB_NAME") or config.run.id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(run.path),
            config=result_values(config),
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )
        self._sent.save_id(str(self._run.id))
        self._run.define_metric("*", step_metric="step")
        self.location = str(self._run.url or f"{run.path / 'wandb'} ({self._run.settings.mode})")

    def add(self, record: EventRecord) -> None:
        point = self._point_builder.point(record)
        if point is not None and self._sent.take(point):
            self._run.log({"step": point.step, "_timestamp": point.time, **point.values})
            self._sent.mark_sent(point)

    def flush(self) -> None:
        self._sent.save()

    def close(self, launch_exit: LaunchExit) -> None:
        if launch_exit.exit_code == ExitCode.PREEMPTED:
            self._run.mark_preempting()
        if launch_exit.error:
            self._run.summary["error"] = launch_exit.error
        self._run.finish(exit_code=launch_exit.exit_code)
        self._sent.save()
