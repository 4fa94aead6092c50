"""Shared fixtures. Real images are found through PODSCALE_TEST_DATA or beside the checkout (see CONTRIBUTING)."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The directory that holds imagenette224.tar and imagenet-500.tar; skips where it is absent."""
    candidates = [os.environ.get("PODSCALE_TEST_DATA"), str(ROOT.parent / "shared" / "data")]
    for candidate in candidates:
        if candidate and (Path(candidate) / "imagenette224.tar").exists():
            return Path(candidate)
    pytest.skip("the real images are not here: set PODSCALE_TEST_DATA to a directory with imagenette224.tar")


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
