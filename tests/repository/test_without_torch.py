"""A TPU image has no torch: the command line, the stages and the ranks must run without it."""

import subprocess
import sys

PROGRAM = """
import importlib, sys
for name in ("torch", "torchvision"):
    sys.modules[name] = None  # an import of it raises ImportError
for name in sys.argv[1:]:
    importlib.import_module(name)
from podscale.config import load
from podscale.launch.worker_spec import build_worker_spec
from pathlib import Path
task = build_worker_spec(load(None, ["train.engine=jax", "launch.processes=2"]), "train", "s", {}, gpus=0, cores=2)
print(*task.command(Path("/r"))[:2])
"""
MODULES = (
    "podscale.cli",
    "podscale.stages.local",
    "podscale.launch.supervisor",
    "podscale.launch.fork_launcher",
    "podscale.launch.worker_main",
    "podscale.jax.worker",
    "podscale.jax.world",
    "podscale.jax.worker_stages",
    "podscale.jax.software",
)


def test_nothing_on_the_way_to_a_rank_of_jax_imports_torch() -> None:
    command = [sys.executable, "-c", PROGRAM, *MODULES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["-m", "podscale.launch.fork_launcher"]
