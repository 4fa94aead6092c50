"""Tables of docs/how-to/drills.md with the results of the drills, below a mark; the text above is hand-written."""

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.system.drills.drill import Fired, Found
from tests.system.drills.faults import Drill, Expected

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "drills.md"
MARK = "<!-- below: written by python -m tests.system.drills -->\n"
COMMAND = "python -m tests.system.drills"


@dataclass(frozen=True)
class Machine:
    """Conditions of a run of the drills; `load` is the load average at the start."""

    date: str
    cores: int
    processor: str
    load: float
    prometheus: str

    @classmethod
    def here(cls) -> "Machine":
        output = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, check=True)
        version = (output.stdout + output.stderr).split("version ")[1].split()[0].partition("+")[0]
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = (names or [platform.machine()])[0]
        return cls(datetime.now(UTC).date().isoformat(), os.cpu_count() or 1, processor, os.getloadavg()[0], version)


def filled_in(text: str, results: Sequence[Found], machine: Machine, seconds: float) -> str:
    """Return the page with new tables below its mark."""
    before, mark, _ = text.partition(MARK)
    assert mark, f"{PAGE} has lost its mark"
    return (
        f"{before}{mark}\n" + "\n".join([*_measured(machine, seconds), *_detection(results), *_itself(results)]) + "\n"
    )


def identity(drill: Drill, expected: Expected) -> list[str]:
    """Return the cells of a row that are not measured: fault, series, alert, and longest time of the shipped rule."""
    labels = ", ".join(f'`{name}="{value}"`' for name, value in expected.labels.items())
    alert = f"[{expected.alert}](../runbooks/{expected.rule.runbook})" + (f" ({labels})" if labels else "")
    return [f"**{drill.name}**: {drill.how}", drill.series, alert, shipped(expected)]


def shipped(expected: Expected) -> str:
    """Return the longest time of the shipped rule, without scrape and evaluation: its full window and its wait."""
    window, wait = round(expected.window_seconds / 60), round(expected.wait_seconds / 60)
    if not window:
        return f"{wait} min" if wait else "at once"
    return f"{window + wait} min ({window} + {wait})"


def _measured(machine: Machine, seconds: float) -> list[str]:
    load = os.getloadavg()[0]
    return [
        f"Measured on {machine.date} with `{COMMAND}` in {seconds:.0f} s: {machine.cores} cores ({machine.processor}), "
        f"Prometheus {machine.prometheus}; load average {machine.load:.1f} at the start, {load:.1f} at the end, "
        "about 2 of it by the two ranks.",
        "",
    ]


def _detection(results: Sequence[Found]) -> list[str]:
    lines = ["## Series, alerts and times", ""]
    lines += [
        "| fault | series | before | during | alert | divided by | holds after | fires after | ends after | "
        "as shipped, at most |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        lines += [_row(one, fired) for fired in one.fired]
    return [*lines, ""]


def _row(result: Found, fired: Fired) -> str:
    fault, series, alert, longest = identity(result.drill, fired.expected)
    over = f"{result.over:.0f} s" if result.over is not None else "not awaited"
    cells = [fault, series, f"{result.before:.3g}", f"{result.during:.3g}", alert, f"{result.drill.shorten:g}"]
    cells += [f"{max(0.0, fired.pending):.1f} s", f"{max(0.0, fired.firing):.1f} s", over, longest]
    return "| " + " | ".join(cells) + " |"


def _itself(results: Sequence[Found]) -> list[str]:
    lines = ["## What Podscale did", "", "| fault | Podscale | other alerts that fired |", "|---|---|---|"]
    return lines + [f"| {one.drill.name} | {one.itself} | {', '.join(one.besides) or 'none'} |" for one in results]
