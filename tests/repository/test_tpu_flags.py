"""Table and committed page of benchmarks/tpu_flags, without the TPU compiler."""

import json
import subprocess
from typing import Any

import pytest

from benchmarks import tpu_flags
from benchmarks.harness import RESULTS
from benchmarks.tpu_flags import BUCKETS, PODSCALE, ROWS, SCHEDULER, SHARDED, TINY, compile_row, flags_text, table
from podscale.jax.aot.hlo import Collective

MESSAGES = [
    Collective("reduce-scatter", "all", 4, 2**24),
    Collective("all-gather", "all", 4, 2**23, is_early=True),
    Collective("all-gather", "all", 4, 2**23),
]


def finished(monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str) -> list[dict[str, Any]]:
    """Let the process of each row end like this; return the environments that they get."""
    environments: list[dict[str, Any]] = []

    def run(command: list[str], *, env: dict[str, Any], **_: Any) -> "subprocess.CompletedProcess[str]":
        environments.append(env)
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(tpu_flags.subprocess, "run", run)
    return environments


def test_a_row_has_its_messages_and_those_that_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = finished(monkeypatch, 0, "warning\n" + json.dumps({"messages": MESSAGES, "seconds": 7.6}), "")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--of-the-user")
    row = (SHARDED, (f"{SCHEDULER}false",))
    assert table([(row, compile_row(row))])[2:] == [
        "| sharded, 6 gradients of 16.0 MiB | `xla_tpu_enable_latency_hiding_scheduler=false` "
        "| 2 all-gathers (16.0 MiB), 1 reduce-scatter (16.0 MiB) | 1 all-gather | 8 s |"
    ]
    assert environments[0]["LIBTPU_INIT_ARGS"] == f"{SCHEDULER}false"


def test_a_row_that_does_not_compile_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    finished(monkeypatch, 1, "", "first\nUnknown flag: a|b\n")
    assert "| none | Unknown flag: a/b |  |  |" in table([(TINY, compile_row(TINY))])[2]


def test_the_committed_page_has_the_rows_and_the_flags_that_podscale_sets() -> None:
    """If the flags have changed, run the benchmark again, and correct its conclusions in docs/explanation/tpu.md."""
    text = (RESULTS / tpu_flags.PAGE).read_text(encoding="utf-8")
    assert text.split("```\n")[1].splitlines() == list(PODSCALE)
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[:2] for row in rows] == [[f"| {step}", flags_text(flags)] for step, flags in ROWS]
    assert (BUCKETS, PODSCALE) in ROWS
