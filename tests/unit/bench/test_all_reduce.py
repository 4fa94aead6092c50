"""`podscale bench allreduce`: definitions of bandwidth, and options."""

from pathlib import Path
from typing import Any

import pytest

from podscale.bench import all_reduce
from tests.support.bench import run_allreduce
from tests.support.refusals import refused

FOUND = {
    "ranks": 4,
    "rows": [2, 2],
    "device": "cpu",
    "backend": "gloo",
    "whole": [{"algorithm": "ring", "bytes": 8_000_000, "seconds": [0.003, 0.002, 0.004], "error": 5e-8}],
    "phases": [
        {"phase": "reduce_scatter", "axis": "row", "ranks": 2, "bytes": 8_000_000, "seconds": [0.002]},
        {"phase": "all_reduce", "axis": "column", "ranks": 2, "bytes": 4_000_000, "seconds": [0.004]},
    ],
    "steps": [{"algorithm": "ring", "seconds": [0.5, 0.4, 0.6], "alone": [0.4, 0.3, 0.5]}],
}


def row(lines: list[str], start: str) -> list[str]:
    line = next(line for line in lines if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_bandwidths_as_nccl_tests_define_them() -> None:
    lines = all_reduce.format_tables(FOUND)
    # 8 MB in 3 ms: 2.667 GB/s; times 2 * 3/4 for an all-reduce over 4 ranks
    assert row(lines, "ring") == ["ring", "8,000,000", "3.000", "4.000", "2.667", "4.000", "5.0e-08"]
    assert row(lines, "row of 2")[-2:] == ["4.000", "2.000"]  # reduce-scatter: times 1/2
    assert row(lines, "column of 2")[-2:] == ["1.000", "1.000"]  # all-reduce over 2: times 2 * 1/2
    exposed = [line for line in lines if line.startswith("| ring |")][-1]
    assert exposed == "| ring | 500.0 | 400.0 | 100.0 | 20.0% |"


@pytest.mark.parametrize(("share", "value"), [(0.95, 19.0), (0.5, 10.0), (1.0, 20.0), (0.01, 1.0)])
def test_percentile_is_a_value_that_was_measured(share: float, value: float) -> None:
    assert all_reduce.percentile([float(n) for n in range(1, 21)], share) == value


def test_sizes() -> None:
    assert all_reduce.parse_sizes("4,64K,1.5M,1G") == [4, 65536, 1_572_864, 2**30]
    for wrong in ("", "1,,2", "2", "-4K", "4X", "K", "²K"):
        with refused(field="--sizes"):
            all_reduce.parse_sizes(wrong)


@pytest.mark.parametrize(
    ("changes", "field", "got"),
    [
        ({"algorithms": "flat,ringg"}, "--algorithms", "ringg"),
        ({"row": 3}, "--row", 3),
        ({"wire": "fp8"}, "--wire", "fp8"),
        ({"out": Path(__file__) / "out"}, "--out", f"{__file__}/out"),
    ],
)
def test_wrong_options_start_nothing(changes: dict[str, Any], field: str, got: object) -> None:
    with refused(field=field, got=got):
        run_allreduce(**changes)
