"""Worker process that runs the tests of this directory."""

import os

import jax
import pytest

from tests.jax.conftest import DEVICES


def test_there_are_simulated_devices() -> None:
    assert jax.device_count() == DEVICES
    assert {device.platform for device in jax.devices()} == {"cpu"}


@pytest.mark.parametrize("number", [1, 2])
def test_parameters_and_fixtures_arrive(number: int, tmp_path: os.PathLike[str]) -> None:
    assert number in (1, 2)
    assert os.path.isdir(tmp_path)  # noqa: PTH112
