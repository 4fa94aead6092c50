"""JAX engine on one CUDA device: the losses of the CPU. Each platform has a process of its own."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from podscale.jax.xla_flags import xla_environment
from podscale.util import host_info

pytestmark = pytest.mark.gpu

TRAIN = """
import json, sys
from pathlib import Path
import jax
from tests.support.engines import document, losses_of, train_in_jax
workspace, shards, precision = sys.argv[1:]
config = document(Path(workspace), train__epochs=2, train__precision=precision, model__width=16)
result = train_in_jax(config, Path(shards), 1)
losses = [loss for _, loss in sorted(losses_of(config).items())]
print(json.dumps([jax.devices()[0].platform, losses, result.skipped]))
"""
TOLERANCES = {"fp32": 2e-3, "bf16": 5e-2}
"""Of a loss, relative: the sums of a GPU have another order, and differences grow from step to step."""


def start(platform: str, workspace: Path, shards: Path, precision: str) -> "subprocess.Popen[str]":
    """Train six steps in a process that takes only the memory of the GPU that it needs."""
    environment = {
        **os.environ,
        **xla_environment(platform, os.environ),
        "JAX_PLATFORMS": platform,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", TRAIN, str(workspace / platform), str(shards), precision]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: "subprocess.Popen[str]") -> tuple[str, list[float], int]:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-4000:]
    platform, losses, skipped = json.loads(output.splitlines()[-1])
    return platform, losses, skipped


@pytest.mark.parametrize("precision", TOLERANCES)
def test_a_compiled_training_has_the_losses_of_the_cpu(make_shard_set: Any, tmp_path: Path, precision: str) -> None:
    if find_spec("jax") is None:
        pytest.skip("JAX is not installed: podscale[jax-cuda]")
    if not host_info.visible_gpus():
        pytest.skip("no CUDA device")
    if find_spec("jax_plugins") is None:
        pytest.skip("JAX has no plugin for CUDA: podscale[jax-cuda]")
    shards = make_shard_set()
    processes = [start(platform, tmp_path, shards, precision) for platform in ("cuda", "cpu")]
    try:
        (platform, losses, skipped), (_, expected, _) = map(result_of, processes)
    finally:
        for process in processes:
            process.kill()
    assert platform in ("gpu", "cuda")
    assert skipped == 0
    assert len(losses) == 6
    assert losses == pytest.approx(expected, rel=TOLERANCES[precision])
    assert len(set(losses)) == 6
