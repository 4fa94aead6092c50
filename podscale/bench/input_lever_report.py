"""Report of the levers of the input pipeline: gain, cores and cost of each change."""

from dataclasses import dataclass
from typing import Any

from podscale.bench.input_headroom import format_cores, format_rate, format_times
from podscale.bench.input_levers import LeverRow, MeasuredLevers
from podscale.util.formatting import format_bytes

MEGABYTE = 2**20
MEMORY_SHARE = 0.8
"""Fraction of the free memory that a cache may take; the training needs the rest."""


@dataclass(frozen=True)
class LeverReport:
    """Levers beside the need and the memory of a host.

    Args:
        needed: Images/s.
        host_images: Training images that the host reads; None if unknown.
        free_memory: Bytes; 0 if unknown.
        processes: Processes of the run on the host, which share a decoded cache.
    """

    levers: MeasuredLevers
    needed: float
    host_images: int | None
    free_memory: int
    processes: int = 1

    def values(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "loader": self.levers.loader,
            "sample_images": self.levers.images,
            "has_decode_index": self.levers.has_index,
            "host_images": self.host_images,
            "free_memory_bytes": self.free_memory,
            "rows": [self._row_values(row) for row in self._rows],
        }

    def lines(self) -> list[str]:
        """Return the lines of the Markdown report."""
        measured = [row for row in self._rows if row.rates]
        failed = [f"{row.variant.name}: not measured: {row.reason}" for row in self._rows if row.reason]
        return [
            f"Measured with the loader {self.levers.loader} on {self.levers.images:,} of these images, in turns, with",
            "batches in the host's memory. A cache has its rate from the second epoch on: the first one fills it.",
            "",
            f"| change | images per CPU-second | times | cores for {format_rate(self.needed)} images/s | set | cost |",
            "|---|---:|---:|---:|---|---|",
            *(self._table_row(row) for row in measured),
            *(["", *failed] if failed else []),
        ]

    @property
    def _rows(self) -> tuple[LeverRow, ...]:
        return (self.levers.base, *self.levers.changes)

    def _table_row(self, row: LeverRow) -> str:
        base_name = "none, with decode index" if self.levers.has_index else "none"
        cells = (
            row.variant.name or base_name,
            format_rate(row.per_core),
            format_times(row.per_core / self.levers.base.per_core),
            format_cores(self.needed / row.per_core),
            self._setting(row),
            self._cost(row),
        )
        return f"| {' | '.join(cells)} |"

    def _setting(self, row: LeverRow) -> str:
        variant = row.variant
        if variant.cache is not None:
            size = self._cache_bytes(row)
            value = "" if size is None else f"={size}"
            return f"`input.decoded_cache_bytes{value}`, `input.decoded_cache_form={variant.cache}`"
        if variant.short_side is not None:
            return f"`data.resize_short={variant.short_side}`"
        return "`podscale shard RUN --decode-index`" if variant.name else ""

    def _cost(self, row: LeverRow) -> str:
        if row.variant.cache is not None:
            return self._memory_cost(row)
        if row.variant.short_side is not None:
            before, after = self.levers.base.bytes_per_image / 1000, row.bytes_per_image / 1000
            return f"other pixels: a new run, from images of {after:.1f} kB in place of {before:.1f}"
        return f"{row.index_share:.1%} of the bytes of the shards" if row.variant.name else ""

    def _memory_cost(self, row: LeverRow) -> str:
        if self.host_images is None:
            return f"{format_bytes(row.bytes_per_image)} of memory for each image"
        text = f"{format_bytes(row.bytes_per_image * self.host_images)} of memory for {self.host_images:,} images"
        if not self.free_memory:
            return text
        text += f", {format_bytes(self.free_memory)} are free"
        if (kept := self._kept(row)) < 1:
            rate = format_rate(self._partial_rate(row, kept))
            text += f": {MEMORY_SHARE:.0%} of that keep {kept:.0%} of the images, which gives {rate}"
        return text

    def _kept(self, row: LeverRow) -> float:
        """Return the fraction of the host's images that fit into MEMORY_SHARE of its free memory, at most 1."""
        if self.host_images is None or not self.free_memory:
            return 1.0
        return min(1.0, MEMORY_SHARE * self.free_memory / (row.bytes_per_image * self.host_images))

    def _partial_rate(self, row: LeverRow, kept: float) -> float:
        """Return the images per CPU-second if only the fraction `kept` of the images is in memory."""
        return 1 / (kept / row.per_core + (1 - kept) / self.levers.base.per_core)

    def _cache_bytes(self, row: LeverRow) -> int | None:
        """Return the bytes of each process for the images that fit, in whole MiB; None if their number is unknown."""
        if self.host_images is None:
            return None
        size = row.bytes_per_image * self.host_images * self._kept(row) / self.processes
        return MEGABYTE * -(-int(size) // MEGABYTE)

    def _row_values(self, row: LeverRow) -> dict[str, Any]:
        values: dict[str, Any] = {
            "change": row.variant.name or "none",
            "set": self._setting(row),
            "reason": row.reason,
            "rates": [rate._asdict() for rate in row.rates],
            "bytes_per_image": row.bytes_per_image,
        }
        if row.rates:
            values |= {
                "images_per_cpu_second": row.per_core,
                "times": row.per_core / self.levers.base.per_core,
                "cores_needed": self.needed / row.per_core,
            }
        if row.variant.cache is not None:
            values["fraction_that_fits"] = self._kept(row)
        return values
