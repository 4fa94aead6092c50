"""A real run directory in a second: softmax regression trained with NumPy on the embedded digits.

The curves are the losses of that training, and the predictions are the trained model's.
"""

import io
import json
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from podscale.config import RunConfig, dumps, loads
from podscale.data.shard_set import ShardSet
from podscale.data.sources.digits import load as load_digits
from podscale.evaluation.evaluation_json import evaluate_run
from podscale.runs import StageOutcome, predictions, write_outcome
from podscale.telemetry.events import EventLog
from tests.support.shard_set import Sample, finish, write_split

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

DOCUMENT = """
run: {id: digits-softmax, seed: 1}
data: {source: digits}
input: {image_size: 8}
model: {name: resnet18, stem: small}
train: {epochs: 6, global_batch: 32, schedule: {learning_rate: 0.5, warmup_epochs: 1}}
claim: {top1: 0.97, minutes: 2.0, hardware: one laptop core, source: this test}
"""


@dataclass(frozen=True)
class DigitsRun:
    """Paths of the run and its shard set."""

    path: Path
    shard_set: Path
    config: RunConfig


def write_digits(
    directory: Path, splits: dict[str, tuple[list[bytes], np.ndarray]], classes: list[str], sources: list[bytes]
) -> ShardSet:
    """Write a shard set of these encoded images, one shard per split, with two rejects and a duplicate on record."""
    summaries, begin = {}, 0
    for name, (images, labels) in splits.items():
        samples = [
            Sample(image, int(label), key=((begin + i) * 0x9E3779B97F4A7C15) % 2**64, source=sources[begin + i])
            for i, (image, label) in enumerate(zip(images, labels, strict=True))
        ]
        summaries[name] = write_split(directory / name, samples, len(classes), 1, 0)
        begin += len(images)
    rejects = [("seven/<b>cut</b>.png", "truncated"), ("nine/half.png", "truncated")]
    finish(directory, summaries, classes, source="digits", rejects=rejects, duplicates={"inside": 1})
    return ShardSet.open(directory)


def png(pixels: np.ndarray) -> bytes:
    """Encode uint8 [h, w] or [h, w, 3] pixels as PNG."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png", compress_level=1)
    return out.getvalue()


def write_digits_set(directory: Path, classes: list[str] = DIGITS, count: int | None = None) -> ShardSet:
    """Write a shard set of the digits, or of the first `count`; four fifths are for training."""
    splits, sources = _digits_splits(classes, count)
    return write_digits(directory, splits, classes, sources)


def _digits_splits(
    classes: list[str], count: int | None
) -> tuple[dict[str, tuple[list[bytes], np.ndarray]], list[bytes]]:
    """Return the digits as PNG files by split, with the source of each."""
    digits = load_digits()
    pixels = (digits["levels"][:count] * 15.9375).astype(np.uint8)
    images, labels = [png(image) for image in pixels], digits["labels"][:count].astype(np.int32)
    cut = len(images) * 4 // 5
    names = [
        f"digits/{classes[label]}/{i:04d}.png".encode("utf-8", "surrogateescape") for i, label in enumerate(labels)
    ]
    return {"train": (images[:cut], labels[:cut]), "validation": (images[cut:], labels[cut:])}, names


def make_digits_run(root: Path, classes: list[str] = DIGITS) -> DigitsRun:
    """Train and evaluate; write a complete run directory except the report and the model card."""
    config = loads(DOCUMENT)
    shards = write_digits_set(root / "shards", classes)
    run = root / "runs" / config.run.id
    (run / "model").mkdir(parents=True)
    (run / "config.yaml").write_text(dumps(config))
    (run / "environment.json").write_text(
        json.dumps({"python": "3.11", "numpy": np.__version__, "command": "podscale run digits.yaml"})
    )
    x, y = _features(shards, "train")
    held_x, held_y = _features(shards, "validation")
    started = time.monotonic()
    weights = _train(config, x, y, held_x, held_y, run / "metrics.jsonl")
    write_outcome(run / "outcome.json", StageOutcome("shard", 0, "", 0.4, "2026-01-01T00:00:00+00:00"))
    write_outcome(run / "outcome.json", StageOutcome("train", 0, "", time.monotonic() - started, ""))
    save_file({"classifier.weight": weights.astype(np.float32)}, run / "model" / "model.safetensors")
    (run / "model" / "model.json").write_text(
        json.dumps({"architecture": "softmax", "classes": classes, "preprocessing": {"image_size": 8}})
    )
    started = time.monotonic()
    held_out = _predict(weights, held_x, held_y, shards.split("validation").keys)
    predictions.write_predictions(run / "predictions.safetensors", held_out)
    seconds = time.monotonic() - started
    with EventLog(run / "metrics.jsonl") as events:
        events.event("evaluated", images=len(held_out), seconds=seconds, processes=1)
    evaluate_run(run, config, shards)
    write_outcome(run / "outcome.json", StageOutcome("evaluate", 0, "", seconds, ""))
    return DigitsRun(run, root / "shards", config)


def _features(shards: ShardSet, name: str) -> tuple[np.ndarray, np.ndarray]:
    split = shards.split(name)
    images = [np.asarray(Image.open(io.BytesIO(split.read(i).tobytes()))) for i in range(len(split))]
    flat = np.stack(images).reshape(len(split), -1) / 255
    return np.hstack([flat, np.ones((len(split), 1))]), np.asarray(split.labels)


def _log_softmax(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    logits = x @ weights
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def _train(
    config: RunConfig, x: np.ndarray, y: np.ndarray, held_x: np.ndarray, held_y: np.ndarray, log: Path
) -> np.ndarray:
    """Train with plain SGD; write the telemetry events with real times and losses."""
    batch, rng = config.train.global_batch, np.random.default_rng(config.run.seed)
    per_epoch = len(x) // batch
    weights = np.zeros((x.shape[1], int(y.max()) + 1))
    lines = [{"time": time.time(), "kind": "event", "event": "start", "step": 0}]
    step, clock, phases = 0, time.perf_counter(), dict.fromkeys(("data_wait", "forward_backward", "optimizer"), 0.0)
    for epoch in range(int(config.train.epochs)):
        order = rng.permutation(len(x))
        for i in range(per_epoch):
            marks = [time.perf_counter()]
            rows = order[i * batch : (i + 1) * batch]
            bx, by = x[rows], y[rows]
            marks.append(time.perf_counter())
            log_p = _log_softmax(bx, weights)
            gradient = np.exp(log_p)
            gradient[np.arange(batch), by] -= 1
            gradient = bx.T @ gradient / batch
            marks.append(time.perf_counter())
            warm = config.train.schedule.warmup_epochs * per_epoch
            rate = config.train.schedule.learning_rate * min(1.0, (step + 1) / warm)
            weights -= rate * gradient
            marks.append(time.perf_counter())
            for name, (a, b) in zip(phases, pairwise(marks), strict=True):
                phases[name] += b - a
            step += 1
            if step % 5 == 0:
                now = time.perf_counter()
                loss = float(-log_p[np.arange(batch), by].mean())
                lines.append(
                    {"time": time.time(), "kind": "step", "step": step, "epoch": step / per_epoch, "loss": loss,
                     "learning_rate": rate, "images_per_second": 5 * batch / (now - clock), "phases": dict(phases)}
                )  # fmt: skip
                clock, phases = now, dict.fromkeys(phases, 0.0)
        log_p = _log_softmax(held_x, weights)
        ranks = np.argsort(-log_p, axis=1)
        lines.append(
            {"time": time.time(), "kind": "evaluation", "step": step, "epoch": epoch + 1,
             "top1": float((ranks[:, 0] == held_y).mean()),
             "top5": float((ranks[:, :5] == held_y[:, None]).any(axis=1).mean()),
             "loss": float(-log_p[np.arange(len(held_y)), held_y].mean())}
        )  # fmt: skip
    lines.append({"time": time.time(), "kind": "event", "event": "done", "step": step})
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return weights


def _predict(weights: np.ndarray, x: np.ndarray, y: np.ndarray, keys: np.ndarray) -> predictions.Predictions:
    log_p = _log_softmax(x, weights)
    topk = np.argsort(-log_p, axis=1, kind="stable")[:, :5]
    return predictions.Predictions(
        np.asarray(keys), y.astype(np.int32), topk.astype(np.int32),
        np.exp(np.take_along_axis(log_p, topk, axis=1)).astype(np.float32),
        -log_p[np.arange(len(y)), y].astype(np.float32),
    )  # fmt: skip
