"""Training step of the JAX engine, compiled for GPUs that exist as a description only.

Needs JAX's plugin for CUDA (podscale[jax-cuda]), or PODSCALE_TEST_JAX_CUDA with a folder into which it is installed.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from podscale.jax.xla_flags import xla_environment
from podscale.version import installed
from tests.support.xla import list_groups

FOLDER = os.environ.get("PODSCALE_TEST_JAX_CUDA", "")
COMPILE = """
import json, sys
from podscale.config import loads
from podscale.jax.aot.compiler import compile_step
from tests.support.described_gpus import described_gpus
analysis, text = compile_step(loads(sys.argv[1], "test"), described_gpus(2, 4), 10, 100)
print(json.dumps([analysis, text]))
"""
DOCUMENT = """
input: {{image_size: 32}}
model: {{name: resnet18, width: 16}}
train:
  engine: jax
  precision: bf16
  global_batch: 256
  epochs: 1
  weight_update: {update}
  all_reduce: {{algorithm: {algorithm}, bucket_mb: 1}}
launch: {{nodes: 2, processes: 1}}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not FOLDER and find_spec("jax_plugins") is None, reason="needs JAX's plugin for CUDA: podscale[jax-cuda]"
    ),
]


def compiled(update: str, algorithm: str) -> tuple[dict[str, Any], str]:
    """Return the report and the program of a step on two hosts of four GPUs, compiled in a process of its own."""
    environment = {
        **os.environ,
        **xla_environment("cuda", {}),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, [FOLDER, *sys.path])),
    }
    command = [sys.executable, "-c", COMPILE, DOCUMENT.format(update=update, algorithm=algorithm)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    analysis, text = json.loads(done.stdout.splitlines()[-1])
    return analysis, list_groups(text)


@pytest.mark.xfail(
    not (installed("jaxlib") or "").startswith("0.10."),
    reason="XLA of jaxlib 0.11.2 sends these buckets as one synchronous message, whatever its combiner's flags",
    strict=True,
)
def test_a_replicated_update_is_compiled_with_asynchronous_messages() -> None:
    analysis, text = compiled("replicated", "flat")
    assert (analysis["mesh"]["column"], analysis["mesh"]["row"]) == (2, 4)  # rows are hosts
    assert analysis["fits"]
    assert analysis["memory"]["aliased"] > 0  # the state is updated in place
    assert "__cudnn$conv" in text
    assert len(re.findall(r" all-reduce-start\(", text)) > 1
    assert not re.findall(r" all-reduce\(", text)


def test_a_torus_sends_along_rows_and_columns() -> None:
    analysis, text = compiled("sharded", "torus2d")
    groups = set(re.findall(r"replica_groups=(\{\{[\d,{}]*\}\})", text))
    assert "{{0,1,2,3},{4,5,6,7}}" in groups  # a row: the GPUs of a host
    assert "{{0,4},{1,5},{2,6},{3,7}}" in groups  # a column: GPUs of the same number on each host
    assert analysis["fits"]
