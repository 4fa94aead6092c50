"""Server of a model in one process, or in several that share the port."""

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from podscale.errors import ExitCode, InputError, PodscaleError
from podscale.prediction.model import PredictionModel, build_classifier
from podscale.serving.app import ServerState
from podscale.serving.http_server import DrainingServer
from podscale.serving.metrics import ServingMetrics
from podscale.serving.options import ServeOptions
from podscale.serving.service import ClassificationService
from podscale.telemetry.registry import MergedMetrics, SnapshotWriter, snapshot_path
from podscale.util import env
from podscale.util.formatting import format_count
from podscale.util.host_info import visible_gpus
from podscale.util.processes import exit_with_parent

BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""


def serve(model: PredictionModel, options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code. Raises InputError if the port or the model is unusable."""
    listeners = [_listen(options.host, options.port, "--port")]
    if options.metrics_port is not None:
        listeners.append(_listen(options.host, options.metrics_port, "--metrics-port"))
    host, port = listeners[0].getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    classes = format_count(len(model.classes), "class")
    print(f"serving {model.files.name} ({classes}) at {address}/predict", file=sys.stderr, flush=True)
    if options.processes == 1:
        _serve_in_process(model, options, listeners, 0, [False], None)
        return int(ExitCode.DONE)
    with tempfile.TemporaryDirectory(prefix="podscale-serve-") as directory:
        return _serve_in_processes(model, options, listeners, Path(directory))


def _serve_in_process(
    model: PredictionModel,
    options: ServeOptions,
    listeners: Sequence[socket.socket],
    index: int,
    ready: Any,
    directory: Path | None,
) -> None:
    """Serve in this process. Raises the error of loading the model.

    Args:
        ready: one flag for each process, True when its model is loaded.
        directory: directory of the processes' metrics; None if this is the only one.
    """
    registry = CollectorRegistry()
    metrics = ServingMetrics(registry, model=model.files.name, process=index)
    gpu = index % max(1, visible_gpus())
    threads = None if env.OMP_NUM_THREADS in os.environ else options.cores  # PyTorch's default ignores a pod's limit
    service = ClassificationService(model, lambda: build_classifier(model, gpu, threads), options, metrics)

    with ExitStack() as stack:
        stack.callback(service.close)
        render: Callable[[], bytes]
        if directory is None:
            render = MergedMetrics(None, registry, interval=0)
        else:
            stack.enter_context(SnapshotWriter(registry, snapshot_path(directory, index)))
            render = MergedMetrics(directory, CollectorRegistry())
        DrainingServer(ServerState(service, options, metrics, render, ready, index)).run([*listeners])
    if isinstance(service.error, PodscaleError):
        raise service.error
    if service.error is not None:
        raise PodscaleError(
            f"the model cannot be loaded: {type(service.error).__name__}: {service.error}", field="MODEL"
        ) from service.error


def _serve_in_processes(
    model: PredictionModel, options: ServeOptions, listeners: Sequence[socket.socket], directory: Path
) -> int:
    """Serve in `options.processes` processes until all have exited; if one fails, the others stop."""
    context = multiprocessing.get_context("spawn")
    ready = context.Array(ctypes.c_bool, options.processes, lock=False)
    arguments = [
        (model, options, listeners, index, ready, directory, os.getpid()) for index in range(options.processes)
    ]
    processes = [context.Process(target=_run_process, args=one, daemon=True) for one in arguments]
    is_stopping = False

    def stop(number: int = 0, frame: object = None) -> None:
        nonlocal is_stopping
        is_stopping = True
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGTERM)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for process in processes:
            process.start()
        if is_stopping:
            stop()  # the signal came before all had started
        for listener in listeners:
            listener.close()
        while running := [process for process in processes if process.exitcode is None]:
            wait([process.sentinel for process in running])
            if not is_stopping:
                stop()  # one has failed; the pod restarts with all of them
        return _first_failure(processes)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_failure(processes: Sequence[BaseProcess]) -> int:
    """Return the exit code of the first process that failed; it has printed its error. 0: none has.

    A process that SIGTERM ended while it started, before it could handle the signal, has not failed.
    """
    codes = [process.exitcode or 0 for process in processes if process.exitcode != -signal.SIGTERM]
    return next((code if code > 0 else 128 - code for code in codes if code), int(ExitCode.DONE))


def _run_process(
    model: PredictionModel,
    options: ServeOptions,
    listeners: Sequence[socket.socket],
    index: int,
    ready: Any,
    directory: Path,
    parent: int,
) -> None:
    exit_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal signals the whole group; the parent forwards it
    try:
        _serve_in_process(model, options, listeners, index, ready, directory)
    except PodscaleError as error:
        print(f"podscale: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _listen(host: str, port: int, option: str) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InputError(f"not an address: {error}", field="--host", got=host) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)  # asyncio sets TCP_NODELAY only if the protocol is known
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = "Choose another port, or 0 for any free one."
        raise InputError(f"cannot listen: {error.strerror}", field=option, got=port, hint=hint) from error
    return listener
