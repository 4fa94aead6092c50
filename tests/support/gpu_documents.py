"""pytest plugin that runs the trainings of tests/gpu without a GPU: each only checks its document.

Tests without a training are left out. A test ends where it needs the GPU or a result. It fails if a document is not
valid, if the trainer would not take it, if an import fails, or if it never came to a training.
"""

from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from podscale.config import RunConfig
from podscale.errors import InputError

checked: list[RunConfig] = []


def train_here(config: RunConfig, shards: Path, watch: Any = None) -> dict[str, Any]:
    """Keep the document; the fixture of tests/gpu calls `build_trainer` with it."""
    checked.append(config)
    return {}


FAKE_FIXTURES = {"world": SimpleNamespace(), "train_here": train_here}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if "train_here" in getattr(item, "fixturenames", ())]


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Any:
    value = FAKE_FIXTURES.get(fixturedef.argname)
    if value is not None:
        fixturedef.cached_result = (value, fixturedef.cache_key(request), None)
    return value


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, bool]:
    checked.clear()
    try:
        yield
    except (pydantic.ValidationError, InputError, ImportError):
        raise
    except (Exception, pytest.fail.Exception):  # it needs the GPU, or a result
        pass
    if not checked:
        pytest.fail("it came to no training")
    for config in checked:
        if "auto" in (config.train.fused_kernels, config.train.all_reduce.algorithm):
            pytest.fail("a worker replaces `auto` before it builds the trainer, which refuses it")
    return True
