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


def enable_program_cache(programs: Path) -> Path:
    """Has JAX keep and look up its programs in a directory there; call it before anything is compiled."""
    directory = programs / _machine_key()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # else this path is part of every entry's key
    if jax.default_backend() == "cpu":
        _share_cache_keys()
    return directory


def _share_cache_keys() -> None:
    """Has all processes know a program for CPUs by one key.

    JAX lets only process 0 write, and a part of its key, the fingerprint of the devices, is another one on every
    process with CPUs (jaxlib 0.10): the others would never find anything. What that part has to tell apart, kinds of
    machine, the directories do. There is no option for it; where JAX has changed, each process compiles for itself.
    """
    with suppress(ImportError, AttributeError):
        from jax._src import cache_key

        cache_key._hash_accelerator_config = cache_key._hash_devices  # type: ignore[assignment]


def synchronize_first_call(program: Any, world: World, name: str) -> Callable[..., Any]:
    """A jitted program whose first call waits, once it is compiled, until it is compiled on every process.

    On CPUs process 0 compiles first, with all cores, and the others, where their CPUs are of its kind, read what it
    has kept.

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
            lowered = program.lower(*arguments)
            reads = _can_read_cache(world)
            if not reads:
                lowered.compile()  # the call finds it
            world.barrier(f"{name}: compiled by process 0")
            if reads:
                lowered.compile()
            world.barrier(name)
            begun = True
        return program(*arguments)

    return call


def _can_read_cache(world: World) -> bool:
    """Whether this process finds what process 0 keeps, which is the only one that JAX lets write."""
    kept: Any = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    places = world.gather(kept if jax.default_backend() == "cpu" else None)
    return not world.is_rank0 and places[0] is not None and places[world.rank] == places[0]


def _machine_key() -> str:
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
