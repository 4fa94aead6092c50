"""Device kernels of a training step by class: launches, time and, from NVIDIA's ncu, bytes of device memory.

    python -m podscale.bench.kernel_classes NCU.csv [GPU]

prints the table of a file of `ncu --csv --page raw --metrics gpu__time_duration.sum,dram__bytes.sum`. With the name of
the GPU, as nvidia-smi prints it, the table has the share of its memory bandwidth.
"""

import csv
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from podscale.errors import InputError
from podscale.hardware import find_gpu_chip

CLASSES = (
    ("collectives", r"nccl"),
    ("optimizer", r"^_(norms|momentum)_kernel|multi_tensor_apply"),
    ("compiled reductions", r"^triton_(red|per)_"),
    ("compiled element-wise", r"^triton_(poi|tem|for)_"),
    ("layout changes of cuDNN", r"nhwcToNchw|nchwToNhwc|nhwcAddPadding|tensorTransform"),
    ("pooling", r"pool"),
    ("batch norm", r"batch_?norm|bn_(fw|bw)|^_\w*(moments|normalise|gradient_sums|input_gradient)_kernel"),
    ("convolutions and matrix products", r"gemm|conv|cutlass|xmma|nvjet|wgrad|dgrad|implicit|splitk|sm\d+_"),
    ("copies", r"memcpy|memset|copy|CatArray"),
    ("element-wise and reductions", r"elementwise|reduce|softmax|loss|fill"),
)
"""Class and pattern of kernel names; the first match counts."""
OTHER = "other"

OPERATOR_CLASSES = (
    ("optimizer", r"::_foreach|::_fused"),
    ("pooling", r"pool"),
    ("batch norm", r"batch_norm"),
    ("convolutions and matrix products", r"conv|::(addmm|mm|bmm|baddbmm|linear|matmul)\b"),
    ("copies", r"copy|::(clone|cat|zero|zeros|zero_|zeros_like|new_zeros|stack)\b"),
)
"""Class of an operator's kernels and pattern of its name; the first match counts, else element-wise and reductions."""

LONGEST_KERNELS = 40
"""Kernels that are listed by name."""

NAME, SECONDS, BYTES = "Kernel Name", "gpu__time_duration.sum", "dram__bytes.sum"
"""Columns of ncu's table."""
UNITS = {
    **{"nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1.0, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0},
    **{"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9},
}
"""Factor of each of ncu's units to seconds or bytes."""


@dataclass
class KernelTotal:
    """Sum over the launches of a kernel or of a class: seconds on the device, bytes of its memory if they are known."""

    name: str
    launches: float
    seconds: float
    bytes: float | None = None


def kernel_class(name: str) -> str:
    """Return the class of a kernel by its name."""
    return next((title for title, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), OTHER)


def operator_class(name: str) -> str:
    """Return the class of the kernels of an operator, such as `aten::convolution`, or of a kernel of ours."""
    if "::" not in name:
        return kernel_class(name)
    found = (title for title, pattern in OPERATOR_CLASSES if re.search(pattern, name))
    return next(found, "element-wise and reductions")


def add_counted_bytes(
    totals: Iterable[KernelTotal], sizes: Mapping[str, float], *, by: Callable[[str], str]
) -> list[KernelTotal]:
    """Return the totals with the bytes counted for `by(name)`; classes that only the count has come last.

    Args:
        sizes: bytes by operator or kernel of ours.
    """
    counted: dict[str, float] = {}
    for name, size in sizes.items():
        counted[by(name)] = counted.get(by(name), 0.0) + size
    result = [replace(total, bytes=counted.pop(total.name, None)) for total in totals]
    return result + [KernelTotal(name, 0, 0.0, size) for name, size in sorted(counted.items(), key=lambda c: -c[1])]


def combine_totals(kernels: Iterable[KernelTotal], *, by: Callable[[str], str] = kernel_class) -> list[KernelTotal]:
    """Add up the kernels with the same `by(name)`, by default of the same class; the longest first."""
    totals: dict[str, KernelTotal] = {}
    for kernel in kernels:
        total = totals.setdefault(by(kernel.name), KernelTotal(by(kernel.name), 0, 0.0))
        total.launches += kernel.launches
        total.seconds += kernel.seconds
        if kernel.bytes is not None:
            total.bytes = (total.bytes or 0.0) + kernel.bytes
    return sorted(totals.values(), key=lambda total: -total.seconds)


def format_totals(
    totals: Sequence[KernelTotal],
    *,
    title: str = "class",
    longest: int | None = None,
    bandwidth: float = 0.0,
    is_counted: bool = False,
) -> list[str]:
    """Return a Markdown table: launches, ms and share of the time of all `totals`; with known bytes also GB and GB/s.

    Args:
        longest: number of rows; None: all. The shares do not depend on it.
        bandwidth: of the GPU's memory, GB/s, for a column with the share of it; 0 if unknown.
        is_counted: the bytes are counted from the tensors of operators, not measured.
    """
    whole = sum(total.seconds for total in totals)
    columns = [title, "launches", "ms", "share"]
    with_bytes = any(total.bytes is not None for total in totals)
    if with_bytes:
        columns += ["GB (counted)" if is_counted else "GB", "GB/s", *(["of the bandwidth"] if bandwidth else [])]
    lines = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    for total in totals[:longest]:
        cells = [total.name, "", "", ""]
        if total.launches:
            cells[1:] = [f"{total.launches:g}", f"{total.seconds * 1e3:.2f}", f"{total.seconds / whole:.1%}"]
        if with_bytes:
            cells += _byte_cells(total, bandwidth)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _byte_cells(total: KernelTotal, bandwidth: float) -> list[str]:
    """Return GB, GB/s and the share of the bandwidth; empty cells for a kernel without bytes or time."""
    if total.bytes is None or not total.seconds:
        return ["" if total.bytes is None else f"{total.bytes / 1e9:.2f}", "", *([""] if bandwidth else [])]
    rate = total.bytes / total.seconds / 1e9
    return [f"{total.bytes / 1e9:.2f}", f"{rate:,.0f}", *([f"{rate / bandwidth:.0%}"] if bandwidth else [])]


def read_ncu_table(path: Path) -> list[KernelTotal]:
    """Read the launches of an ncu table. Raises InputError if it has none."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    start = next((n for n, line in enumerate(lines) if f'"{NAME}"' in line), None)
    if start is None:
        hint = f"Run ncu with --csv --page raw --metrics {SECONDS},{BYTES}"
        raise InputError("no table of ncu", field=str(path), hint=hint)
    units, *rows = csv.DictReader(lines[start:])
    return [
        KernelTotal(row[NAME], 1, _number(row[SECONDS], units[SECONDS]), _number(row[BYTES], units[BYTES]))
        for row in rows
        if row.get(SECONDS)
    ]


def _number(text: str, unit: str) -> float:
    return float(text.replace(",", "")) * UNITS[unit]


def main() -> None:
    launches = read_ncu_table(Path(sys.argv[1]))
    chip = find_gpu_chip(sys.argv[2]) if len(sys.argv) > 2 else None
    bandwidth = chip.memory_bandwidth if chip else 0.0
    seconds = sum(launch.seconds for launch in launches)
    size = sum(launch.bytes or 0.0 for launch in launches)
    print(f"{len(launches)} launches, {seconds * 1e3:.2f} ms, {size / 1e9:.1f} GB\n")
    print("\n".join(format_totals(combine_totals(launches), bandwidth=bandwidth)))
    print()
    kernels = combine_totals(launches, by=str)
    print("\n".join(format_totals(kernels, title="kernel", longest=LONGEST_KERNELS, bandwidth=bandwidth)))


if __name__ == "__main__":
    main()
