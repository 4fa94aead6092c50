"""`podscale bench allreduce`: definitions of bandwidth, options, and a real measurement on two processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from podscale.bench import all_reduce
from podscale.cli.bench import allreduce
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
    for wrong in ("", "1,,2", "2", "-4K", "4X", "K"):
        with refused(field="--sizes"):
            all_reduce.parse_sizes(wrong)


def run(out: Path | None = None, **changes: Any) -> None:
    values: dict[str, Any] = {
        "ranks": 2,
        "algorithms": "flat,torus2d",
        "sizes": "4K,256K",
        "wire": "fp32",
        "row": 1,
        "bucket_mb": 1.0,
        "seconds": 0.02,
        "model": "",
        "side": 32,
        "batch": 2,
        "time_limit": 120.0,
        "out": out,
        "as_json": True,
    }
    allreduce(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "field", "got"),
    [
        ({"algorithms": "flat,ringg"}, "--algorithms", "ringg"),
        ({"row": 3}, "--row", 3),
        ({"wire": "fp8"}, "--wire", "fp8"),
        ({"out": Path("/no/such/folder")}, "--out", "/no/such/folder"),
    ],
)
def test_wrong_options_start_nothing(changes: dict[str, Any], field: str, got: object) -> None:
    with refused(field=field, got=got):
        run(**changes)


def test_two_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "allreduce.json").read_text())
    assert report["rows"] == [2, 1]
    assert [(one["algorithm"], one["bytes"]) for one in report["whole"]] == [
        ("flat", 4096), ("flat", 262144), ("torus2d", 4096), ("torus2d", 262144),
    ]  # fmt: skip
    assert all(len(one["seconds"]) >= 3 and min(one["seconds"]) > 0 and one["error"] < 1e-6 for one in report["whole"])
    assert {(one["axis"], one["ranks"]) for one in report["phases"]} == {("column", 2)}, "a row of one has no phases"
    assert "| torus2d | 262,144 |" in (tmp_path / "allreduce.md").read_text()
    assert (tmp_path / "allreduce.svg").read_text().startswith("<svg")
