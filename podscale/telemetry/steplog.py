"""What a person sees of a running stage: one line per logged step, evaluation and event."""

import json
from collections.abc import Iterable
from typing import Any, Literal, TextIO

from podscale.telemetry.events import Record

HIDDEN = ("time", "kind", "event")
STYLES = {"step": "", "evaluation": "bold green", "event": "dim"}
WARNING_EVENTS = ("skipped_update", "bad_record", "damaged_checkpoint", "lost_rank", "restart")


class StepLog:
    """Writes the records of metrics.jsonl to a stream: text for people, JSON lines for machines.

    mode: `text`, `json`, or `auto`: text where the stream is a terminal. Colours appear on a terminal only.
    """

    def __init__(self, stream: TextIO, mode: Literal["auto", "text", "json"] = "auto") -> None:
        terminal = stream.isatty()
        self._stream = stream
        self._json = mode == "json" or (mode == "auto" and not terminal)
        self._console = _console(stream) if terminal and not self._json else None
        self._remaining = RemainingTime()

    def write(self, record: Record) -> None:
        """Shows one record."""
        if self._json:
            line = json.dumps(record)
        else:
            line = describe(record, self._remaining.after(record))
        if self._console is None:
            self._stream.write(line + "\n")
            self._stream.flush()
        else:
            style = "yellow" if record.get("event") in WARNING_EVENTS else STYLES.get(record["kind"], "")
            self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


class RemainingTime:
    """Estimates the seconds left from the pace since the launch began (its `start` or `resumed` record)."""

    def __init__(self) -> None:
        self._total: int | None = None
        self._begin: tuple[int, float] | None = None

    def after(self, record: Record) -> float | None:
        """Seconds left after this record; None where the total or the pace is not known yet."""
        if record.get("event") in ("start", "resumed"):
            self._total = record.get("total_steps", self._total)
            self._begin = (int(record.get("step") or 0), record["time"])
            return None
        if record["kind"] != "step" or self._begin is None or self._total is None:
            return None
        steps, seconds = record["step"] - self._begin[0], record["time"] - self._begin[1]
        return (self._total - record["step"]) * seconds / steps if steps > 0 else None


def describe(record: Record, seconds_left: float | None = None) -> str:
    """One line of text for a record."""
    if record["kind"] == "step":
        return _join(
            f"step {record['step']:>6}",
            f"epoch {record['epoch']:.2f}",
            f"loss {_number(record['loss'], '.4f')}",
            f"lr {_number(record['learning_rate'], '.3g')}",
            f"{record['images_per_second']:,.0f} images/s",
            f"{duration(seconds_left)} left" if seconds_left is not None else "",
        )
    if record["kind"] == "evaluation":
        return _join(
            f"evaluation after step {record['step']}",
            f"epoch {record['epoch']:.2f}",
            f"top-1 {record['top1']:.2%}",
            f"top-5 {record['top5']:.2%}",
            f"loss {_number(record['loss'], '.4f')}",
        )
    name = str(record.get("event", record["kind"])).replace("_", " ")
    return _join(name, *(f"{key} {_plain(value)}" for key, value in record.items() if key not in HIDDEN))


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as 1:02:03 or 2:03."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _join(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _plain(value: Any) -> str:
    """A value on one line, without characters that would move a terminal's cursor."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return printable(text.splitlines())


def printable(lines: Iterable[str]) -> str:
    return " | ".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)


def _console(stream: TextIO) -> Any:
    from rich.console import Console  # only where there is a terminal to colour

    return Console(file=stream)
