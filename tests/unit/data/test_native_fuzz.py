"""Comparison of the fuzzer's corpus with the reference path and Pillow (tests/support/native_fuzz.py).

`make fuzz` runs the fuzzer.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import native_fuzz
from tests.support.loading import needs_native

pytestmark = needs_native


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    native_fuzz.write_seeds(tmp_path / "corpus")
    return tmp_path / "corpus"


def test_the_seeds_are_alike_or_refused(seeds: Path) -> None:
    counts = native_fuzz.compare(seeds)
    assert counts.total() == len(list(seeds.iterdir()))
    assert counts["all crops decoded"] > 40
    assert counts["refused natively, refused too by the reference path"] > 0


def test_other_pixels_name_the_file(seeds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = native_fuzz.CropDecoder.decode

    def flawed(self: native_fuzz.CropDecoder, *arrays: Any) -> Any:
        status = decode(self, *arrays)
        arrays[4][0, 0, 0, 0] ^= status[0] == 0
        return status

    monkeypatch.setattr(native_fuzz.CropDecoder, "decode", flawed)
    with pytest.raises(AssertionError, match="seed-"):
        native_fuzz.compare(seeds)


def fuzzer(folder: Path, script: str) -> Path:
    """Return a program that stands for the fuzzer."""
    program = folder / "fuzzer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_counts_are_those_that_libfuzzer_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = "#2 INITED cov: 3 ft: 4\n#9 DONE cov: 81 ft: 90\nstat::number_of_executed_units: 1234\n"
    monkeypatch.setattr(native_fuzz, "PROGRAM", fuzzer(tmp_path, f"printf '{printed}' >&2"))
    counts = native_fuzz.fuzz(tmp_path, 0.1)
    assert (counts["inputs"], counts["edges"]) == (1234, 81)


def test_a_crash_of_the_fuzzer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_fuzz, "PROGRAM", fuzzer(tmp_path, "exit 77"))
    with pytest.raises(subprocess.CalledProcessError):
        native_fuzz.fuzz(tmp_path, 0.1)


def test_a_slow_or_large_input_is_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libFuzzer's own limits are 20 minutes and 2 GiB, and a slow input does not end it otherwise."""
    options = tmp_path / "options"
    script = f'echo "$@" > {options}; echo "cov: 1\nstat::number_of_executed_units: 1" >&2'
    monkeypatch.setattr(native_fuzz, "PROGRAM", fuzzer(tmp_path, script))
    native_fuzz.fuzz(tmp_path, 0.1)
    assert {"-timeout=10", "-rss_limit_mb=2048"} <= {*options.read_text().split()}


def test_runs_of_the_same_sources_are_added(tmp_path: Path) -> None:
    file, counts = tmp_path / "runs.json", {"inputs": 7, "cpu_seconds": 2, "edges": 81}
    assert native_fuzz.add_run(file, "a", counts) == {"runs": 1, "cpu_seconds": 2, "inputs": 7}
    assert native_fuzz.add_run(file, "a", counts) == {"runs": 2, "cpu_seconds": 4, "inputs": 14}
    assert native_fuzz.add_run(file, "b", counts) == {"runs": 1, "cpu_seconds": 2, "inputs": 7}
