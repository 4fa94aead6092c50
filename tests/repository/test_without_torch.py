"""A TPU image has no torch, and packing needs none: both run without it."""

import os
import subprocess
import sys
from pathlib import Path

from podscale.errors import ExitCode

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


def test_packing_needs_no_torch(tmp_path: Path) -> None:
    """Every process of the command, its workers too, finds neither torch nor JAX."""
    missing = ("torch", "torchvision", "jax", "jaxlib")
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({missing}))\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    podscale = [sys.executable, "-m", "podscale"]
    packed = subprocess.run(
        [*podscale, "shard", "digits", "--workers", "2"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert packed.returncode == 0, packed.stderr
    (shard_set,) = (path for path in (tmp_path / "datasets").iterdir() if path.is_dir())
    looked = [*podscale, "shard", "--inspect", str(shard_set), "--contact-sheet", "sheet"]
    inspected = subprocess.run(looked, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert inspected.returncode == 0, inspected.stderr
    trained = subprocess.run([*podscale, "train", "digits"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert trained.returncode == ExitCode.BAD_INPUT
    assert [line for line in trained.stderr.splitlines() if line.startswith("  - train.engine: ") and "torch" in line]
