"""Compiled programs: kept beside the run, so that a restart does not compile them again, and begun together.

What is kept can never end a run: an entry that is damaged, or a directory that cannot be written, only costs the time
of compiling (JAX warns, and goes on).
"""

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from podscale.jax.world import World
from podscale.rundir import RunDirectory


def keep_programs(run: RunDirectory) -> Path:
    """Has JAX keep and look up its programs in a directory of the run; call it before anything is compiled."""
    directory = run.programs / _machine()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # else this path is part of every entry's key
    return directory


def begun_together(program: Any, world: World, name: str) -> Callable[..., Any]:
    """A jitted program whose first call waits, once it is compiled, until it is compiled on every process.

    Compiling may take one process minutes and another, which finds the program kept, a second; but gloo, which is what
    CPUs meet by, waits for a peer no longer than 30 s where devices meet for the first time, and in every
    reduce-scatter. Raises HangDetected with those that do not come. name: of what begins, for that message.
    """
    if world.size == 1:
        return program  # type: ignore[no-any-return]
    begun = False

    def call(*arguments: Any) -> Any:
        nonlocal begun
        if not begun:
            program.lower(*arguments).compile()  # the call finds it
            world.barrier(name)
            begun = True
        return program(*arguments)

    return call


def _machine() -> str:
    """What programs are made for; those of CPUs use whatever instructions the CPU that compiles has."""
    kind = jax.default_backend()
    if kind != "cpu":
        return kind
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = sorted({line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))})
    return f"cpu-{hashlib.sha256(repr([platform.machine(), *flags]).encode()).hexdigest()[:12]}"
