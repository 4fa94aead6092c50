"""Persistent cache of compiled programs, so that no process, restart or later run compiles them again.

The cache never fails a run: a damaged entry, or a directory that cannot be written, only costs the time of compiling
(JAX warns and continues). All processes start a new program together.
"""

import hashlib
import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from podscale.jax.world import World

MIN_COMPILE_SECONDS = 0.5
"""Compile time from which a program is cached, seconds."""


def enable_program_cache(programs: Path) -> Path:
    """Make JAX cache its programs in a directory of `programs`. Call it before anything is compiled."""
    directory = programs / _machine_key()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # else this path is part of every entry's key
    if jax.default_backend() == "cpu":
        _share_cache_keys()
    return directory


def _share_cache_keys() -> None:
    """Give a CPU program the same cache key on all processes.

    JAX lets only process 0 write, and part of its key, the fingerprint of the devices, differs between processes with
    CPUs (jaxlib 0.10), so that the other processes would find nothing. Kinds of machine have directories of their own
    instead. JAX has no option for it. If its internals have changed, each process compiles for itself.
    """
    with suppress(ImportError, AttributeError):
        from jax._src import cache_key

        cache_key._hash_accelerator_config = cache_key._hash_devices  # type: ignore[assignment]


def synchronize_first_call(program: Any, world: World, name: str) -> Callable[..., Any]:
    """Wrap a jitted program: its first call waits until the program is compiled on every process.

    Compiling may take minutes on one process and a second on another, which finds the program in the cache. But gloo,
    the transport of CPUs, waits for a peer at most 30 s in the first collective and in every reduce-scatter. On CPUs
    process 0 compiles first, with all cores. Processes with CPUs of the same kind read its cached program. Raises
    StoreTimeout with the processes that do not reach the barrier `name`.
    """
    if world.size == 1:
        return program  # type: ignore[no-any-return]
    is_compiled = False

    def call(*arguments: Any) -> Any:
        nonlocal is_compiled
        if not is_compiled:
            lowered = program.lower(*arguments)
            reads_cache = _can_read_cache(world)
            if not reads_cache:
                lowered.compile()  # the call finds it
            world.barrier(f"{name}: compiled by process 0")
            if reads_cache:
                lowered.compile()
            world.barrier(name)
            is_compiled = True
        return program(*arguments)

    return call


def _can_read_cache(world: World) -> bool:
    """Return True if this process shares the cache of process 0, the only one that JAX lets write."""
    directory: Any = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    directories = world.gather(directory if jax.default_backend() == "cpu" else None)
    return not world.is_rank0 and directories[0] is not None and directories[world.rank] == directories[0]


def _machine_key() -> str:
    """Return the kind of machine that programs are compiled for, including the instruction sets of a CPU."""
    kind = jax.default_backend()
    if kind != "cpu":
        return kind
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = sorted({line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))})
    return f"cpu-{hashlib.sha256(repr([platform.machine(), *flags]).encode()).hexdigest()[:12]}"
