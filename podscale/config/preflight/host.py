"""Preflight checks of this machine: its devices, memory and ports, and enough images for its ranks."""

import errno
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from podscale.config.batch_phases import largest_batch, largest_pass
from podscale.config.ranks import check_ranks
from podscale.config.run_config import RunConfig
from podscale.errors import InputError
from podscale.util import host_info
from podscale.util.formatting import format_bytes

MIN_PROCESS_BYTES = 200 * 2**20
"""Memory of a training process without arrays, bytes."""
PAGE_BYTES, PAGE_ENTRY_BYTES = 4096, 8
"""Bytes of a page of memory, and of its entry in the page table of each process that maps it."""


def host_problems(document: RunConfig, counts: dict[str, int], *, in_pod: bool) -> Iterator[InputError]:
    """Yield the problems of this machine.

    Args:
        document: the run document.
        counts: samples of the shard set by split; empty if it does not exist yet.
        in_pod: True if this machine is one of launch.nodes.
    """
    processes, nodes = processes_per_node(document), document.launch.nodes
    yield from _gpu_problems(document, processes)
    if nodes > 1 and not in_pod:
        hint = "Set launch.nodes=1, or compile the pipeline for a cluster."
        yield InputError("this is one machine", field="launch.nodes", got=nodes, hint=hint)
    else:
        try:
            check_ranks(document, nodes * max(processes, local_device_count(document)))
        except InputError as error:
            yield error
        yield from _memory_problems(document, processes)
    yield from _port_problems(document)
    yield from _count_problems(document, counts, processes)


def processes_per_node(document: RunConfig) -> int:
    """Return the training processes on this node: launch.processes, else one per GPU, else one."""
    return document.launch.processes or host_info.default_processes_per_node()


def local_device_count(document: RunConfig) -> int:
    """Return the devices of this machine that JAX computes on; 0 for PyTorch, because each process has one."""
    if document.train.engine == "pytorch":
        return 0
    processes = processes_per_node(document)
    simulated = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    gpus = host_info.visible_gpus() if processes == 1 else 0  # each of several processes takes one
    return host_info.tpu_device_count() or gpus or processes * (int(simulated[1]) if simulated else 0)


def _gpu_problems(document: RunConfig, processes: int) -> Iterator[InputError]:
    gpus = host_info.visible_gpus()
    if gpus and processes > gpus:
        problem = f"only {gpus} GPUs are visible here"
        yield InputError(problem, field="launch.processes", got=processes, hint=f"Set launch.processes={gpus}")
    if document.train.all_reduce.backend == "nccl" and not gpus:
        yield InputError(
            "no GPU is visible here",
            field="train.all_reduce.backend",
            got="nccl",
            hint="Check the driver and the job's resources, or set train.all_reduce.backend=auto to train on CPUs.",
        )
    if document.train.cuda_graph and not gpus:
        yield InputError("needs an NVIDIA GPU", field="train.cuda_graph", got=True, hint="Set train.cuda_graph=false")


def _memory_problems(document: RunConfig, processes: int) -> Iterator[InputError]:
    memory, section = host_info.memory_info(), document.input
    available = memory.available
    if available and processes * MIN_PROCESS_BYTES > available:
        yield InputError(
            f"needs about {format_bytes(processes * MIN_PROCESS_BYTES)} of memory, {format_bytes(available)} are free",
            field="launch.processes",
            got=processes,
            hint=f"Set launch.processes to {max(1, available // MIN_PROCESS_BYTES)} or less.",
        )
    caches = input_cache_bytes(document, processes)
    if available and caches > available:
        yield InputError(
            f"with input.decoded_cache_bytes={section.decoded_cache_bytes} the caches of {processes} processes may "
            f"hold {format_bytes(caches)}, {format_bytes(available)} of memory are free",
            field="input.record_cache_bytes",
            got=section.record_cache_bytes,
            hint="Lower them.",
        )
    needed, free = shared_memory_bytes(document, processes), memory.shared_free
    if free < needed and Path("/dev/shm").exists():
        yield InputError(
            f"{format_bytes(free)} free, the batches in flight need about {format_bytes(needed)}",
            field="/dev/shm",
            hint="Mount a larger one (a memory-backed emptyDir in a pod, --shm-size in a container), or lower "
            "input.prefetch and input.workers.",
        )


def input_cache_bytes(document: RunConfig, processes: int) -> int:
    """Return the maximal bytes of the input caches of one node with `processes` training processes.

    Each process maps the decoded images of all of them, and has page tables for them.
    """
    decoded = processes * document.input.decoded_cache_bytes
    page_tables = processes * decoded * PAGE_ENTRY_BYTES // PAGE_BYTES
    return processes * document.input.record_cache_bytes + decoded + page_tables


def shared_memory_bytes(document: RunConfig, processes: int) -> int:
    """Return the bytes of /dev/shm for the batches in flight of one node with `processes` training processes."""
    section = document.input
    if section.loader == "synthetic":
        return 0
    per_rank = largest_pass(document.train).pass_images // (processes * document.launch.nodes)
    return processes * (section.prefetch + section.workers) * per_rank * 3 * max(document.training_sizes) ** 2


def _port_problems(document: RunConfig) -> Iterator[InputError]:
    telemetry = document.telemetry
    if not telemetry.enabled or not telemetry.required:
        return  # the run logs the problem and continues without metrics
    family = socket.AF_INET6 if ":" in telemetry.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((telemetry.address, telemetry.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                hint = "Choose another port, or telemetry.port=0 for any free one."
                problem = "another program listens there"
                yield InputError(problem, field="telemetry.port", got=telemetry.port, hint=hint)
            else:
                problem = f"cannot listen there: {error.strerror or error}"
                yield InputError(problem, field="telemetry.address", got=telemetry.address)


def _count_problems(document: RunConfig, counts: dict[str, int], processes: int) -> Iterator[InputError]:
    if not counts:
        return
    nodes, largest = document.launch.nodes, largest_batch(document.train)
    train, validation = counts.get("train", 0), counts.get("validation", 0)
    if train < largest.global_batch:
        problem = f"larger than the training split of {train} images"
        hint = f"Set {largest.batch_option} to {train} or less."
        yield InputError(problem, field=largest.batch_option, got=largest.global_batch, hint=hint)
    if min(train, validation) < processes * nodes:
        problem = f"{processes * nodes} ranks, but only {train} training and {validation} validation images"
        hint = f"Lower it to {max(1, min(train, validation) // nodes)} or less, or give more images."
        yield InputError(problem, field="launch.processes", got=processes, hint=hint)
