"""Markdown and JSON report of `podscale bench input`: rates of the loaders, need of the training, headroom, levers."""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from podscale.bench.input_headroom import Headroom, format_cores, format_rate
from podscale.bench.input_lever_report import LeverReport
from podscale.bench.input_levers import LEVER_LOADERS
from podscale.bench.input_need import NeededRate
from podscale.bench.input_rates import InputRow, InputSettings
from podscale.config import InputSection
from podscale.data.loaders.build_loader import decode_index_hint
from podscale.data.shard_set import Split
from podscale.util import host_info
from podscale.util.formatting import format_count
from podscale.version import installed

PACKAGES = ("pillow", "simplejpeg", "numpy", "torch", "torchvision", "nvidia-dali-cuda130")


@dataclass(frozen=True)
class RunInput:
    """Input pipeline of the document on this host.

    Args:
        loader: Loader that the document gets on this host.
        workers: Value of input.workers, threads of each process.
        processes: Processes on this host.
    """

    loader: str
    workers: int
    processes: int

    @property
    def threads(self) -> int:
        return self.workers * self.processes


@dataclass(frozen=True)
class InputReport:
    """Result of the measurement with its conditions; take the latter before measuring (`describe`)."""

    conditions: Mapping[str, Any]
    need: NeededRate
    rows: Sequence[InputRow]
    run: RunInput | None = None
    levers: LeverReport | None = None

    def values(self) -> dict[str, Any]:
        """Return the values for JSON."""
        rows = [asdict(row) | {"rates": [rate._asdict() for rate in row.rates]} for row in self.rows]
        for row, values in zip(self.rows, rows, strict=True):
            if row.rates:
                values |= {
                    "images_per_second": row.per_second,
                    "images_per_cpu_second": row.per_cpu_second,
                    "cores_needed": self.need.per_second / row.per_cpu_second,
                    "headroom": self._headroom(row).ratio,
                    "missing_images_per_second": self._headroom(row).missing,
                }
        return {
            **self.conditions,
            "needed_rate": asdict(self.need),
            "run": asdict(self.run) if self.run is not None else None,
            "rows": rows,
            "levers": self.levers.values() if self.levers is not None else None,
        }

    def lines(self) -> list[str]:
        """Return the lines of the Markdown report."""
        found, needed = self.conditions, format_rate(self.need.per_second)
        measured = [row for row in self.rows if row.rates]
        memory = "the host's memory" if found["device"] == "cpu" else f"the memory of {found['device']}"
        lines = [
            "# Input rates",
            "",
            f"Command: `{found['command']}`  ",
            f"Machine: {found['cores']} cores of {found['cpu']}; GPUs: {', '.join(found['gpus']) or 'none'}; "
            f"load average at the start {found['load_average']:.1f}  ",
            f"Versions: {', '.join(f'{name} {version}' for name, version in found['versions'].items())}  ",
            f"Date: {found['date']}",
            "",
            f"{found['images']:,} images {found['origin']}.",
            f"They have {found['kilobytes']:.1f} kB and {found['megapixels']:.2f} MP on average.",
            f"Batches of {found['batch']} at {found['image_size']} px (filter: {found['interpolation']}), with random",
            f"crops, half of them mirrored, ready in {memory}.",
            "No training ran beside. Rates are medians of the rounds, with the range of images/s. CPU time is that of",
            "all threads of the process.",
            "",
            "| loader | workers | images/s | range | images per CPU-second | cores in use | cores for "
            f"{needed} images/s |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *(self._table_row(row) for row in measured),
            "",
            "## Headroom",
            "",
            f"Needed: {needed} images/s: {self.need.source}.",
            "",
            *(f"- {self._conclusion(row)}" for row in _fastest(measured)),
            *self._remarks(measured),
            "",
            "## What would raise it",
            "",
            *self._lever_lines(measured),
        ]
        if failed := [row for row in self.rows if row.reason]:
            lines += ["", "Not measured:", "", "| loader | reason |", "|---|---|"]
            lines += [f"| {row_name(row)} | {row.reason.replace('|', '/')} |" for row in failed]
        return lines

    def _remarks(self, measured: Sequence[InputRow]) -> list[str]:
        """Return the remarks on refused images and on the threads of the document."""
        remarks = [
            f"- {row_name(row)}: the extension refused {row.refused:,} images, decoded by the reference."
            for row in measured
            if row.refused
        ]
        own = [row for row in _fastest(measured) if self.run is not None and row.loader == self.run.loader]
        cores = self.conditions["cores"]
        if self.run is not None and own and own[0].workers is not None and self.run.threads < cores:
            rate = format_rate(own[0].per_cpu_second * self.run.threads)
            remarks.append(
                f"- The document has input.workers={self.run.workers}, {format_count(self.run.threads, 'thread')} on "
                f"this host: about {rate} images/s. input.workers={-(-cores // self.run.processes)} uses all cores."
            )
        return remarks

    def _lever_lines(self, measured: Sequence[InputRow]) -> list[str]:
        """Return the lines on cores, on the native extension, and on the measured levers."""
        lines = []
        cpu_rows = [row for row in _fastest(measured) if row.loader in LEVER_LOADERS]
        if cpu_rows:
            best = max(cpu_rows, key=lambda row: row.per_cpu_second)
            lines += [self._advice_on_cores(best), ""]
        if any(row.loader == "native" and row.reason for row in self.rows):
            lines += ["The native extension: it is not usable here. `podscale doctor` prints the remedy.", ""]
        if self.levers is not None:
            return lines + self.levers.lines()
        if self.conditions["decode_index_hint"] and any(row.loader == "native" for row in measured):
            lines += [f"native: {self.conditions['decode_index_hint']}", ""]
        return [*lines, "Cache, decode index and smaller images were not measured."]

    def _advice_on_cores(self, row: InputRow) -> str:
        headroom = self._headroom(row)
        if headroom.cores_needed <= headroom.cores:
            condition = "" if headroom.ratio >= 1 else " if no other work takes their time"
            return f"The cores are enough{condition}. Each change below leaves more of their time to the training."
        cores = format_cores(headroom.cores_needed)
        return f"More cores: {cores} like these give the need with the loader {row.loader}, without another change."

    def _headroom(self, row: InputRow) -> Headroom:
        return Headroom(row.per_second, row.per_cpu_second, self.need.per_second, self.conditions["cores"])

    def _table_row(self, row: InputRow) -> str:
        rates = [rate.per_second for rate in row.rates]
        cells = (
            row.loader,
            str(row.workers or ""),
            format_rate(row.per_second),
            f"{format_rate(min(rates))} to {format_rate(max(rates))}",
            format_rate(row.per_cpu_second),
            f"{row.per_second / row.per_cpu_second:.1f}",
            format_cores(self.need.per_second / row.per_cpu_second),
        )
        return f"| {' | '.join(cells)} |"

    def _conclusion(self, row: InputRow) -> str:
        is_own = self.run is not None and row.loader == self.run.loader
        return f"{row_name(row)}{' (the loader of this run)' if is_own else ''}: {self._headroom(row)}"


def describe(
    command: str, split: Split, section: InputSection, settings: InputSettings, gpus: Sequence[str], load: float
) -> dict[str, Any]:
    """Return the conditions of a measurement.

    Args:
        load: Load average before the measurement.
    """
    versions = {"Python": platform.python_version()} | {name: installed(name) or "not installed" for name in PACKAGES}
    pixels = split.column("width").astype(float) * split.column("height")
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "cores": host_info.cpu_count(),
        "cpu": host_info.cpu_name(),
        "gpus": list(gpus),
        "load_average": load,
        "versions": versions,
        "images": len(split),
        "kilobytes": float(split.column("size").mean()) / 1000,
        "megapixels": float(pixels.mean()) / 1e6,
        "image_size": section.image_size,
        "decode_index_hint": decode_index_hint(split, section.crop),
        "interpolation": section.interpolation,
        **asdict(settings),
    }


def row_name(row: InputRow) -> str:
    """Return the loader and its workers for tables and messages."""
    if row.workers is None:
        return row.loader
    return f"{row.loader}, {format_count(row.workers, 'worker')}"


def _fastest(rows: Sequence[InputRow]) -> list[InputRow]:
    """Return the fastest row of each loader, in the order of the rows."""
    fastest: dict[str, InputRow] = {}
    for row in rows:
        fastest[row.loader] = max(row, fastest.get(row.loader, row), key=lambda one: one.per_second)
    return list(fastest.values())
