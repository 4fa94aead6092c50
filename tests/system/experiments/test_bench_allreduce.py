"""`podscale bench allreduce` on two real processes."""

import json
from pathlib import Path

import pytest

from tests.support.bench import run_allreduce


def test_two_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_allreduce(tmp_path)
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
