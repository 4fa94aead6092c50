"""Training on a CPU without AVX-512, which has another kernel for strided 1x1 convolutions."""

import os
import platform
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, MakeShardSet

TRAINING = """
import sys
from pathlib import Path
from tests.support.engines import small, train_in_torch

workspace, shards, model = sys.argv[1:]
config = small(Path(workspace), **({"model": {"name": model}} if model else {}))
print("trained", train_in_torch(config, Path(shards)).steps)
"""
FAULTY = re.compile(r",backward_weights,.*[,_]ic[1-7]oc\d+_ih\d+oh\d+kh1(?:sh[2-9]|sh1dh0ph\d+_iw\d+ow\d+kw1sw[2-9])")
"""Line of oneDNN's log: weight gradient of a strided 1x1 convolution of fewer than 8 channels."""


@pytest.mark.parametrize("model", ["", "python:tests.support.user_models:strided_pointwise"])
def test_a_tiny_network_trains_with_the_kernels_of_avx2(model: str, make_shard_set: MakeShardSet) -> None:
    """Runs in its own process, because the fault corrupts the heap: the process aborts or hangs in the kernel.

    The test also reads oneDNN's log, because some processes survive the fault.
    """
    shards = make_shard_set()
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ONEDNN_VERBOSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(shards.parent), str(shards), model],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trained 12" in done.stdout
    assert not [line for line in done.stdout.splitlines() if FAULTY.search(line)]
    if platform.machine() == "x86_64":
        assert re.search(r",backward_weights,.*kh1sh1", done.stdout), "oneDNN's log has another format"
