"""MLPerf Training log, mlperf.log, with lines `:::MLLOG {JSON}` and the keys of mlperf_logging's compliance checker.

`run_start` is logged right before the first training image is read. `run_stop` is logged at the evaluation that reaches
`train.target_top1`, else at the end with status `aborted`. A block is the training between two evaluations. A test runs
the checker on a log. mlperf_logging is not used, because it would add pandas to every training image.

The log is not a valid submission: no system cache is cleared (`cache_clear` is false), a resumed run has two
`run_start` lines, which the checker refuses, and evaluations are as frequent as the run document says.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from podscale.config import RunConfig
from podscale.config.ranks import batch_norm_group
from podscale.data.step_positions import StepPositions, step_positions


class MlperfLog:
    """Writer of the log of one launch; `fence` raises if a newer launch owns the run."""

    def __init__(self, path: Path, config: RunConfig, fence: Callable[[], None] | None = None) -> None:
        self._path, self._config, self._fence = path, config, fence or (lambda: None)
        self._buffered: list[str] | None = []  # until it is known whether this launch resumes the run
        self._positions = StepPositions.constant(1, 1)
        self._block_start = 0
        self._running = False
        telemetry = config.telemetry
        self._event("cache_clear", False)
        self._start("init_start")
        self._event("submission_benchmark", "resnet")
        self._event("submission_division", telemetry.mlperf_division)
        self._event("submission_org", telemetry.mlperf_org)
        self._event("submission_status", "research")

    def run_start(
        self, *, resumed: bool, step: int, ranks: int, device: str, train_images: int, validation_images: int
    ) -> None:
        """Write the hyperparameters and `run_start`; training continues after step `step`."""
        config = self._config
        self._positions = step_positions(config.train, train_images)
        self._event("submission_platform", f"{ranks} x {device}")
        self._event("train_samples", train_images)
        self._event("eval_samples", validation_images)
        for key, value in hyperparameters(config, self._positions.epoch_length, ranks):
            self._event(key, value)
        self._end("init_stop")
        self._flush_buffered(append=resumed)
        self._start("run_start")
        self._running = True
        self._begin_block(step)

    def evaluation_started(self, step: int) -> None:
        self._end("block_stop", first_epoch_num=self._epoch(self._block_start), **self._position(step))
        self._start("eval_start", **self._position(step))

    def evaluated(self, step: int, top1: float, *, target_reached: bool) -> None:
        """Log the accuracy after `step` steps; the run stops if it reached the target."""
        self._event("eval_accuracy", top1, **self._position(step))
        self._end("eval_stop", **self._position(step))
        if target_reached:
            self._stop("success")
        else:
            self._begin_block(step)

    def close(self) -> None:
        """Log status `aborted` unless the run reached the target."""
        if self._running:
            self._stop("aborted")

    def _begin_block(self, step: int) -> None:
        self._block_start = step
        settings, epoch = self._config.evaluate, self._epoch(step)
        until_first = round(settings.offset - epoch, 2)
        count = until_first if until_first > 0 else settings.every_epochs or self._config.train.epochs
        self._start("block_start", first_epoch_num=epoch, epoch_count=count, samples_count=self._samples_seen(step))

    def _stop(self, status: str) -> None:
        self._running = False
        self._end("run_stop", status=status)

    def _position(self, step: int) -> dict[str, Any]:
        return {"epoch_num": self._epoch(step), "samples_count": self._samples_seen(step)}

    def _epoch(self, step: int) -> float:
        return round(self._positions.epoch_before(step), 2)

    def _samples_seen(self, step: int) -> int:
        return self._positions.images_before(step)

    def _start(self, key: str, value: Any = None, **metadata: Any) -> None:
        self._append("INTERVAL_START", key, value, metadata)

    def _end(self, key: str, value: Any = None, **metadata: Any) -> None:
        self._append("INTERVAL_END", key, value, metadata)

    def _event(self, key: str, value: Any, **metadata: Any) -> None:
        self._append("POINT_IN_TIME", key, value, metadata)

    def _append(self, kind: str, key: str, value: Any, metadata: dict[str, Any]) -> None:
        self._fence()
        line = {"namespace": "", "time_ms": int(time.time() * 1000), "event_type": kind, "key": key, "value": value}
        text = f":::MLLOG {json.dumps({**line, 'metadata': metadata})}\n"
        if self._buffered is not None:
            self._buffered.append(text)
            return
        with self._path.open("a", encoding="ascii") as file:
            file.write(text)

    def _flush_buffered(self, *, append: bool) -> None:
        """Write the buffered lines; `append` keeps the lines of the previous launch."""
        assert self._buffered is not None
        with self._path.open("a" if append else "w", encoding="ascii") as file:
            file.writelines(self._buffered)
        self._buffered = None


def hyperparameters(config: RunConfig, steps_per_epoch: float, ranks: int) -> Iterator[tuple[str, Any]]:
    """Yield the keys that the MLPerf rules require, with the document's values; LARS and SGD have their own keys.

    The rules know one global batch. If it changes, that of the first step is given, and lengths are in such batches.
    """
    train, optimizer, schedule = config.train, config.train.optimizer, config.train.schedule
    yield "seed", config.run.seed
    yield "global_batch_size", train.global_batch
    yield "gradient_accumulation_steps", train.accumulation
    yield "model_bn_span", batch_norm_group(config, ranks).total
    yield "opt_name", optimizer.name
    prefix = f"{optimizer.name}_opt" if optimizer.name in ("sgd", "lars") else "opt"
    yield f"{prefix}_base_learning_rate", schedule.learning_rate
    if optimizer.has_option("momentum"):
        yield f"{prefix}_momentum", optimizer.momentum
    yield f"{prefix}_weight_decay", optimizer.weight_decay
    yield f"{'lars_opt' if prefix == 'lars_opt' else 'opt'}_learning_rate_warmup_epochs", schedule.warmup_epochs
    if optimizer.name == "lars":
        yield "lars_epsilon", optimizer.effective_eps
    if schedule.name == "polynomial":
        decay = schedule.decay_epochs or train.epochs - schedule.warmup_epochs
        yield f"{prefix}_end_learning_rate", schedule.end_learning_rate
        yield f"{prefix}_learning_rate_decay_poly_power", schedule.power
        yield f"{prefix}_learning_rate_decay_steps", round(decay * steps_per_epoch)
