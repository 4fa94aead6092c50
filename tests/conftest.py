"""Shared fixtures. Real images are found through PODSCALE_TEST_DATA or beside the checkout (see CONTRIBUTING)."""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.digits_run import DigitsRun

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The directory that holds imagenette224.tar and imagenet-500.tar; skips where it is absent."""
    candidates = [os.environ.get("PODSCALE_TEST_DATA"), str(ROOT.parent / "shared" / "data")]
    for candidate in candidates:
        if candidate and (Path(candidate) / "imagenette224.tar").exists():
            return Path(candidate)
    pytest.skip("the real images are not here: set PODSCALE_TEST_DATA to a directory with imagenette224.tar")


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> "DigitsRun":
    """A finished run on the digits (see tests/support/digits_run.py); copy it before changing it."""
    from tests.support.digits_run import make_digits_run

    return make_digits_run(tmp_path_factory.mktemp("digits"))


def _shard_fixtures() -> Any:
    """The fixtures that write small shard sets, which live beside the unit tests."""
    path = Path(__file__).parent / "unit" / "conftest.py"
    spec = importlib.util.spec_from_file_location("podscale_shard_fixtures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_shards = _shard_fixtures()
make_shard_set = _shards.make_shard_set
shard_tools = _shards.shard_tools
