"""Training on a CPU without AVX-512, which has another kernel for strided 1x1 convolutions."""

import os
import platform
import re
import subprocess
import sys

from tests.conftest import ROOT, MakeShardSet

TRAINING = """
import sys
from pathlib import Path
from tests.support.engines import small, train_in_torch

print("trained", train_in_torch(small(Path(sys.argv[1])), Path(sys.argv[2])).steps)
"""
FAULTY = re.compile(r",backward_weights,.*[,_]ic[1-7]oc\d+_ih\d+oh\d+kh1sh[2-9]")
"""Line of oneDNN's log: weight gradient of a strided 1x1 convolution of fewer than 8 channels."""


def test_a_tiny_network_trains_with_the_kernels_of_avx2(make_shard_set: MakeShardSet) -> None:
    """Runs in its own process, because the fault corrupts the heap: the process aborts or hangs in the kernel.

    The test also reads oneDNN's log, because some processes survive the fault.
    """
    shards = make_shard_set()
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ONEDNN_VERBOSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(shards.parent), str(shards)],
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
