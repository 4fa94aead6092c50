"""Step log of a running stage: one line per logged step, evaluation and event."""

import json
from collections.abc import Mapping
from typing import Any, Literal, TextIO

from podscale.telemetry.events import EventRecord
from podscale.telemetry.phases import phase_fractions
from podscale.util.formatting import format_bytes, format_count, format_duration, one_line
from podscale.util.terminal import paint, terminal_width

StyledText = tuple[str, str]
"""Part of a line and its style (names of terminal.ANSI_CODES)."""

HIDDEN_FIELDS = ("time", "kind", "event")
WARNING_EVENTS = (
    "skipped_update",
    "bad_record",
    "checkpoint_passed",
    "restart",
    "preempted",
    "launcher_lost",
    "straggler",
    "tracker_failed",
)
SHOWN_PHASES = {"data_wait": "data", "forward_backward": "compute", "allreduce_wait": "wait"}
"""Phases in a step's line, as fractions of the time since the previous line."""


EVENT_TEXTS = {
    "checkpoint_passed": "checkpoint of step {step} cannot be used: {reason}",
    "skipped_update": "step {step} skipped: its loss or gradient is not finite; the weights are unchanged",
    "batch": "batches of {global_batch:,} images after step {step} (epoch {epoch:.2f})",
    "restart": "restart  {error}  {left} more allowed",
    "preempted": "stopped on request; step {step} is saved",
    "launcher_lost": "the launcher of this job's pipeline was silent for {grace_seconds:g} s; saving and stopping",
    "tracker_failed": "the tracker {tracker} failed, the run continues without it: {reason}",
}
"""Events with a fixed text, filled in from the record."""


class StepLog:
    """Writer of the records of metrics.jsonl to a stream, as text or as JSON lines.

    Args:
        mode: `auto` writes text to a terminal, with colours, and JSON elsewhere.
    """

    def __init__(self, stream: TextIO, mode: Literal["auto", "text", "json"] = "auto") -> None:
        self._stream = stream
        self.json = mode == "json" or (mode == "auto" and not stream.isatty())
        self._eta = EtaEstimator()

    def write(self, record: EventRecord) -> None:
        seconds_left = self._eta.update(record)
        line = json.dumps(record) if self.json else self._line(record, seconds_left)
        self._stream.write(line + "\n")
        self._stream.flush()

    def _line(self, record: EventRecord, seconds_left: float | None) -> str:
        parts = styled_parts(record, seconds_left, self._eta.total_steps)
        if self._stream.isatty() and len(_plain_text(parts)) >= terminal_width():
            parts = [(text, style) for text, style in parts if style != "dim"]
        return "  ".join(paint(text, style, self._stream) for text, style in parts)


class EtaEstimator:
    """Estimator of the seconds left, from the speed since the launch began (its `start` or `resumed` record).

    The speed is in epochs, because the batch may change; in steps for records without epochs.
    """

    def __init__(self) -> None:
        self.total_steps: int | None = None
        self._total_epochs: float | None = None
        self._begin: tuple[float, float] | None = None

    def update(self, record: EventRecord) -> float | None:
        """Return the seconds left after this record; None while the total or the speed is unknown."""
        if record.get("event") in ("start", "resumed"):
            self.total_steps = record.get("total_steps", self.total_steps)
            self._total_epochs = record.get("total_epochs")
            self._begin = (self._position(record), record["time"])
            return None
        total = self.total_steps if self._total_epochs is None else self._total_epochs
        if record["kind"] != "step" or self._begin is None or total is None:
            return None
        position = self._position(record)
        done, seconds = position - self._begin[0], record["time"] - self._begin[1]
        return max(0.0, total - position) * seconds / done if done > 0 else None

    def _position(self, record: EventRecord) -> float:
        return float((record.get("step") if self._total_epochs is None else record.get("epoch")) or 0)


def format_record(record: EventRecord, seconds_left: float | None = None, total: int | None = None) -> str:
    """Return the line of a record as plain text; `total` is the number of steps of the run."""
    return _plain_text(styled_parts(record, seconds_left, total))


def styled_parts(record: EventRecord, seconds_left: float | None = None, total: int | None = None) -> list[StyledText]:
    """Return the line of a record as styled parts; if it is too long, the dim parts may be omitted."""
    if record["kind"] == "step":
        return _step(record, seconds_left, total)
    if record["kind"] == "evaluation":
        return _evaluation(record)
    style = "yellow" if record.get("event") in WARNING_EVENTS else ""
    name = str(record.get("event"))
    if name in EVENT_TEXTS:
        return [(one_line(EVENT_TEXTS[name].format_map(record)), style)]
    formatter = _EVENT_FORMATTERS.get(name, _other_event)
    return [(one_line(text), style or part_style) for text, part_style in formatter(record) if text]


def _step(record: EventRecord, seconds_left: float | None, total: int | None) -> list[StyledText]:
    position = f"{record['step']:>{len(str(total))}}/{total}" if total else f"{record['step']:>6}"
    line = [
        (f"step {position}", "cyan"),
        (f"epoch {record['epoch']:.2f}", ""),
        (f"loss {_format_number(record['loss'], '.4f')}", "bold" if record["loss"] is not None else "yellow"),
        (f"lr {_format_number(record['learning_rate'], '<8.3g')}", ""),
        (f"{record['images_per_second']:>7,.0f} images/s", ""),
        (f"{format_duration(seconds_left)} left" if seconds_left is not None else "", ""),
        (_phases(record.get("phases", {})), "dim"),
    ]
    return [part for part in line if part[0]]


def _phases(phases: Mapping[str, float]) -> str:
    fractions = phase_fractions(phases)
    return "  ".join(f"{word} {fractions.get(name, 0.0):>3.0%}" for name, word in SHOWN_PHASES.items() if fractions)


def _evaluation(record: EventRecord) -> list[StyledText]:
    line = [
        (f"evaluation  step {record['step']}", "green"),
        (f"epoch {record['epoch']:.2f}", "green"),
        (f"top-1 {record['top1']:.2%}", "bold green"),
        (f"top-5 {record['top5']:.2%}", "green"),
        (f"loss {_format_number(record['loss'], '.4f')}", "green"),
    ]
    rate = record.get("images_per_second")
    return [*line, (f"{rate:,.0f} images/s", "green")] if rate else line


def _start(record: EventRecord) -> list[StyledText]:
    event = f"resumed  after step {record['step']}" if record["event"] == "resumed" else "start"
    line = [(event, "bold")]
    if "ranks" in record:
        device = f" on {record['device']}" if "device" in record else ""
        line.append((f"{format_count(record['ranks'], 'process')}{device}", ""))
    if "total_steps" in record:
        batch = f" of {format_count(record['global_batch'], 'image')}" if "global_batch" in record else ""
        line.append((f"{format_count(record['total_steps'], 'step')}{batch}", ""))
    if "parameters" in record:
        line.append((format_count(record["parameters"], "parameter"), ""))
    return line


def _checkpoint(record: EventRecord) -> list[StyledText]:
    return [(f"checkpoint  step {record['step']}  {format_bytes(record['bytes'])} in {record['seconds']:.2f} s", "dim")]


def _bad_record(record: EventRecord) -> list[StyledText]:
    if "substituted" not in record:
        return _other_event(record)
    count = format_count(record["substituted"], "record")
    return [(f"{count} could not be decoded so far and replaced by others", "")]


def _done(record: EventRecord) -> list[StyledText]:
    skipped = record.get("skipped_updates")
    return [("done", "bold"), (f"step {record['step']}", ""), (f"{skipped} skipped" if skipped else "", "yellow")]


def _straggler(record: EventRecord) -> list[StyledText]:
    rank = f"rank {record['rank']} on {record['host']}"
    if record["event"] == "straggler_over":
        return [(f"{rank} is no longer a straggler", "")]
    return [
        (f"{rank} is a straggler: busy {record['ratio']:.2f} times as long as the fastest rank", ""),
        (f"{record['milliseconds']} ms per step, the fastest {record['fastest_milliseconds']} ms", ""),
    ]


def _goodput(record: EventRecord) -> list[StyledText]:
    """Format the goodput and the longest other states."""
    total = max(record["wall_seconds"], 1e-9)
    badput = {name: seconds for name, seconds in record["seconds"].items() if name != "productive"}
    longest = sorted(((seconds, name) for name, seconds in badput.items() if seconds >= 0.005 * total), reverse=True)
    fractions = "  ".join(f"{name.replace('_', ' ')} {seconds / total:.0%}" for seconds, name in longest)
    return [(f"goodput {record['goodput']:.0%}", "bold"), (f"of {format_duration(total)}", ""), (fractions, "dim")]


def _startup(record: EventRecord) -> list[StyledText]:
    """Format the time to the first step and its longest parts."""
    total = max(record["seconds"], 1e-9)
    longest = sorted(((seconds, part) for part, seconds in record["parts"].items()), reverse=True)
    parts = [f"{part.replace('_', ' ')} {seconds:.1f} s" for seconds, part in longest if seconds >= 0.05 * total]
    since = "submission" if "scheduling" in record["parts"] else "start of the process"
    return [(f"first step {total:.1f} s after {since}", "bold"), ("  ".join(parts), "dim")]


def _evaluated(record: EventRecord) -> list[StyledText]:
    rate = record["images"] / max(record["seconds"], 1e-9)
    return [
        (f"evaluated  {format_count(record['images'], 'image')}", "bold"),
        (f"{record['seconds']:.1f} s", ""),
        (f"{rate:,.0f} images/s", ""),
        (format_count(record["processes"], "process"), ""),
    ]


def _other_event(record: EventRecord) -> list[StyledText]:
    name = str(record.get("event", record["kind"])).replace("_", " ")
    fields = [f"{key} {_format_value(value)}" for key, value in record.items() if key not in HIDDEN_FIELDS]
    return [(text, "dim") for text in (name, *fields)]


_EVENT_FORMATTERS = {
    "start": _start,
    "resumed": _start,
    "checkpoint": _checkpoint,
    "bad_record": _bad_record,
    "done": _done,
    "goodput": _goodput,
    "startup": _startup,
    "straggler": _straggler,
    "straggler_over": _straggler,
    "evaluated": _evaluated,
}


def _plain_text(line: list[StyledText]) -> str:
    return "  ".join(text for text, _ in line)


def _format_number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
