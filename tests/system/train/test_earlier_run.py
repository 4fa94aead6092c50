"""A run that an earlier version began: today's code resumes it to the weights of its uninterrupted training."""

import zipfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from podscale.telemetry.events import read_records
from tests.support.commands import podscale, set_options

ARCHIVE = Path(__file__).with_name("run_of_0d398bf6.zip")
"""Document, workspace and results of a run of commit 0d398bf6, before the modules moved to their packages.

`ws` has the shard set of 54 digits, and the run, stopped in its third epoch. `uninterrupted` has the last checkpoint
of a run that was not stopped. benchmarks/results/earlier-runs.md has the commands.
"""
STOPPED, LAST = 11, 32
"""Steps of the two checkpoints."""
ROUNDING = 2e-5
"""Tolerance of a value. On the CPU that wrote the archive the bits agree. With the kernels of SSE 4.1 values differ by
up to 4.8e-7, and with one thread by up to 3.8e-6."""


def test_a_run_of_an_earlier_version_resumes_to_its_own_weights(tmp_path: Path) -> None:
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    run = tmp_path / "ws" / "runs" / "digits-tiny"
    done = podscale(tmp_path, "train", "run.yaml", *set_options("run.workspace=ws", "launch.threads=2"))
    assert done.code == 0, done.last
    records = list(read_records(run / "metrics.jsonl"))
    assert [line["step"] for line in records if line.get("event") == "resumed"] == [STOPPED]
    assert [line["step"] for line in records if line["kind"] == "step"] == list(range(1, LAST + 1))

    for name in ("model", "optimizer", "ema"):
        found = load_file(run / "checkpoints" / f"step-{LAST}" / f"{name}.safetensors")
        expected = load_file(tmp_path / "uninterrupted" / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_allclose(found[key], array, rtol=0, atol=ROUNDING, err_msg=f"{name}: {key}")
