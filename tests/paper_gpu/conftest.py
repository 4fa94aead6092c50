"""Fixtures: the stub of CUDA, and a process that runs training steps on it."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.paper_gpu import stub as stub_of_cuda


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Skip the whole matrix unless it is asked for: it takes some minutes (`make test-gpu-paper`)."""
    if not os.environ.get("PODSCALE_TEST_PAPER_GPU"):
        for item in items:
            if "whole_matrix" in item.fixturenames:
                item.add_marker(pytest.mark.skip(reason="some minutes; run by `make test-gpu-paper`"))


@pytest.fixture
def whole_matrix() -> None:
    """Mark a test as part of the matrix that `make test` leaves out."""


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of the compiled stub."""
    if reason := stub_of_cuda.reason_to_skip():
        pytest.skip(reason)
    return stub_of_cuda.build(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="session")
def session(stub: dict[str, str]) -> Iterator[stub_of_cuda.StepSession]:
    started = stub_of_cuda.StepSession(stub)
    yield started
    started.close()
