"""Tests of the JAX engine: each runs in a worker process, on eight simulated devices.

Devices must be simulated before jax is first used in a process, and other tests use jax too (optax), while pytest runs
many files in each of its processes. So here pytest only collects and reports. A worker process, which all tests of
this directory share, runs each test with the values of its parameters and fixtures. A process that has run jax has
threads and must not fork, as pytest's own process does for other tests.
"""

import gc
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from podscale.models.resnet import BASIC, BOTTLENECK, IMAGENET_BLOCKS
from tests.support.xla import QUICK_XLA

DEVICES = 8
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # Devices are threads that wait for each other in a collective; on a busy machine one may be late.
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES} "
    f"{QUICK_XLA} "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
}
WORKER = pytest.StashKey["Worker"]()


class Worker:
    """Worker process, from the first test to the end of the session.

    It caches compiled programs in `programs`, because many tests train the same small networks, in this process and in
    those of other pytest-xdist workers.
    """

    def __init__(self, programs: Path) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit this process's jax
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        before = dict(os.environ)
        os.environ.update(ENVIRONMENT, JAX_COMPILATION_CACHE_DIR=str(programs))
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()

    def run(self, module: str, function: str, arguments: dict[str, Any], shallow: bool) -> tuple[str, str]:
        """Call a function by name. Returns the outcome (`passed`, `skipped`, `failed`) and the reason."""
        try:
            self._pipe.send((module, function, arguments, shallow))
            outcome: tuple[str, str] = self._pipe.recv()
        except (EOFError, BrokenPipeError):
            self._process.join(10)
            return "failed", f"the worker process ended with code {self._process.exitcode}; see its output above"
        return outcome

    def end(self) -> None:
        """Close the pipe and wait, so that the process exits by itself and writes its coverage."""
        self._pipe.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    names = pyfuncitem._fixtureinfo.argnames  # the function's own arguments
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    shallow = pyfuncitem.get_closest_marker("shallow") is not None
    outcome, reason = pyfuncitem.session.stash[WORKER].run(
        pyfuncitem.module.__name__, pyfuncitem.originalname, arguments, shallow
    )
    if outcome == "skipped":
        pytest.skip(reason)
    if outcome == "failed":
        pytest.fail(reason, pytrace=False)
    return True


@pytest.fixture(scope="session", autouse=True)
def _worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    worker = request.session.stash[WORKER] = Worker(folder / "programs")
    yield
    worker.end()


@contextmanager
def shallow_networks() -> Iterator[None]:
    """Replace the ResNets by ones with fewer blocks of the same kinds, which compile two to three times as fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(IMAGENET_BLOCKS, "resnet18", (BASIC, (1, 1, 1, 1)))
        patch.setitem(IMAGENET_BLOCKS, "resnet50", (BOTTLENECK, (2, 1, 1, 1)))
        yield


def _serve(pipe: Connection) -> None:
    while True:
        try:
            module, function, arguments, shallow = pipe.recv()
        except EOFError:
            return
        try:
            gc.disable()  # imports leave nothing to collect
            called = getattr(importlib.import_module(module), function)
            gc.enable()
            with shallow_networks() if shallow else nullcontext():
                called(**arguments)
            outcome = ("passed", "")
        except pytest.skip.Exception as reason:
            outcome = ("skipped", str(reason))
        except BaseException:
            outcome = ("failed", traceback.format_exc())
        pipe.send(outcome)
