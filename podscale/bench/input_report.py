"""Markdown and JSON report of `podscale bench input`: rates of the loaders, and the cores that a GPU needs."""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from podscale.bench.input_rates import InputRow, InputSettings
from podscale.bench.train_report import REFERENCE_RATES
from podscale.config import InputSection
from podscale.data.loaders.build_loader import decode_index_hint
from podscale.data.shard_set import Split
from podscale.hardware import find_gpu_chip
from podscale.util import host_info
from podscale.version import installed

PACKAGES = ("pillow", "simplejpeg", "numpy", "torch", "torchvision", "nvidia-dali-cuda130")
DEFAULT_CHIP = "H100"
"""Chip whose need is compared on hosts without a GPU of a published rate."""


@dataclass(frozen=True)
class NeededRate:
    """Images/s that one GPU takes, and the source of the number."""

    per_second: float
    source: str


def published_need(gpus: Sequence[str]) -> NeededRate:
    """Return the published rate of ResNet-50 on the first of these GPUs, by default on an H100."""
    chip = find_gpu_chip(gpus[0]) if gpus else None
    name = chip.name if chip is not None and chip.name in REFERENCE_RATES else DEFAULT_CHIP
    rates = REFERENCE_RATES[name]
    return NeededRate(rates.published, f"ResNet-50 at 224 px on one {name}; {rates.source}")


@dataclass(frozen=True)
class InputReport:
    """Result of the measurement with its conditions; take the latter before measuring (`describe`)."""

    conditions: Mapping[str, Any]
    need: NeededRate
    rows: Sequence[InputRow]

    def values(self) -> dict[str, Any]:
        """Return the values for JSON."""
        rows = [asdict(row) | {"rates": [rate._asdict() for rate in row.rates]} for row in self.rows]
        for row, values in zip(self.rows, rows, strict=True):
            if row.rates:
                values |= {
                    "images_per_second": row.per_second,
                    "images_per_cpu_second": row.per_cpu_second,
                    "cores_needed": self.need.per_second / row.per_cpu_second,
                }
        return {**self.conditions, "needed_rate": asdict(self.need), "rows": rows}

    def lines(self) -> list[str]:
        """Return the lines of the Markdown report."""
        found, needed = self.conditions, f"{self.need.per_second:,.0f}"
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
            f"{found['images']:,} images of {found['kilobytes']:.1f} kB and {found['megapixels']:.2f} MP on average.",
            f"Batches of {found['batch']} at {found['image_size']} px ({found['interpolation']}), with random crops,",
            f"half of them mirrored, ready in {memory}.",
            "No training ran beside. Rates are medians of the rounds, with the range of images/s. CPU time is that of",
            "all threads of the process.",
            "",
            "| loader | workers | images/s | range | images per CPU-second | cores in use | cores for "
            f"{needed} images/s |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *(self._table_row(row) for row in measured),
            "",
            f"{needed} images/s: {self.need.source}. This host has {found['cores']} cores.",
            *(self._conclusion(row) for row in _fastest(measured)),
        ]
        for row in measured:
            if row.refused:
                lines.append(
                    f"{row_name(row)}: the extension refused {row.refused:,} images, decoded by the reference."
                )
        if found["decode_index_hint"] and any(row.loader == "native" for row in measured):
            lines.append(f"native: {found['decode_index_hint']}")
        if failed := [row for row in self.rows if row.reason]:
            lines += ["", "Not measured:", "", "| loader | reason |", "|---|---|"]
            lines += [f"| {row_name(row)} | {row.reason.replace('|', '/')} |" for row in failed]
        return lines

    def _table_row(self, row: InputRow) -> str:
        rates = [rate.per_second for rate in row.rates]
        cells = (
            row.loader,
            str(row.workers or ""),
            format_rate(row.per_second),
            f"{format_rate(min(rates))} to {format_rate(max(rates))}",
            format_rate(row.per_cpu_second),
            f"{row.per_second / row.per_cpu_second:.1f}",
            f"{self.need.per_second / row.per_cpu_second:.1f}",
        )
        return f"| {' | '.join(cells)} |"

    def _conclusion(self, row: InputRow) -> str:
        fraction = row.per_second / self.need.per_second
        return f"{row_name(row)}: {format_rate(row.per_second)} images/s are {fraction:.2f} times that."


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
    return f"{row.loader}, {row.workers} worker{'s' if row.workers > 1 else ''}"


def format_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _fastest(rows: Sequence[InputRow]) -> list[InputRow]:
    """Return the fastest row of each loader, in the order of the rows."""
    fastest: dict[str, InputRow] = {}
    for row in rows:
        fastest[row.loader] = max(row, fastest.get(row.loader, row), key=lambda one: one.per_second)
    return list(fastest.values())
