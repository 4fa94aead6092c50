"""Shared fixtures. Real images are in PODSCALE_TEST_DATA or beside the checkout (see CONTRIBUTING)."""

import gc
import os
import sys

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before NumPy and torch: their threads would spin beside those of other workers

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from podscale.util.host_info import cpu_count, memory_info

if TYPE_CHECKING:
    from tests.support.digits_run import DigitsRun

# jsonschema would import this to check IRIs, which no schema here has: a second for its grammar, in each worker.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
gc.disable()  # until all tests are collected: imports leave nothing to collect
pytest_plugins = ["tests.support.kfp_stack", "tests.support.lost_workers", "tests.support.skipped_tests"]

ROOT = Path(__file__).resolve().parent.parent


WORKER_BYTES = 3 * 2**30
"""Memory of a pytest worker with the process that runs JAX and the processes of a test, bytes."""


@pytest.hookimpl(optionalhook=True)  # only asked by pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """Return the workers of `-n auto`: more than there are cores, because many tests wait for processes."""
    cores, memory = cpu_count(), memory_info().total
    return min(8, max(cores + 1, min(cores + 3, memory // WORKER_BYTES)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip slow tests unless they are asked for."""
    if "PODSCALE_TEST_SLOW" in os.environ:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes long: make test-slow runs it"))


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay until the end
    gc.set_threshold(5_000)  # at the default, collections took 4 % of the time: they visit all imported modules
    gc.enable()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Directory of imagenette224.tar and imagenet-500.tar; skips if it is absent."""
    candidates = [os.environ.get("PODSCALE_TEST_DATA"), str(ROOT.parent / "shared" / "data")]
    for candidate in candidates:
        if candidate and (Path(candidate) / "imagenette224.tar").exists():
            return Path(candidate)
    pytest.skip("the real images are not here: set PODSCALE_TEST_DATA to a directory with imagenette224.tar")


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> "DigitsRun":
    """Finished run on the digits (see tests/support/digits_run.py); copy it before changing it."""
    from tests.support.digits_run import make_digits_run

    return make_digits_run(tmp_path_factory.mktemp("digits"))


MakeShardSet = Callable[..., Path]


@pytest.fixture
def make_shard_set(tmp_path: Path) -> MakeShardSet:
    """make(splits, shards=..., classes=..., name=...) -> a small complete shard set (tests/support/shard_set.py)."""
    from tests.support import shard_set

    def make(*arguments: Any, name: str = "shards", **options: Any) -> Path:
        return shard_set.make_shard_set(tmp_path / name, *arguments, **options)

    return make
