"""Devices that JAX looks for."""

import os

import pytest

from podscale.jax import software
from podscale.util import host_info


@pytest.mark.parametrize(
    ("plugin", "gpus", "libtpu", "given", "platforms"),
    [
        (True, 0, None, None, "cpu"),
        (True, 0, None, "cuda", "cuda"),
        (True, 1, None, None, None),
        (True, 0, "0.1", None, None),
        (False, 0, None, None, None),
    ],
)
def test_without_gpus_the_plugin_for_cuda_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
    plugin: bool,
    gpus: int,
    libtpu: str | None,
    given: str | None,
    platforms: str | None,
) -> None:
    """CUPTI, which it asks for its version, ends a process without a driver."""
    monkeypatch.setattr(software, "has_cuda_plugin", lambda: plugin)
    monkeypatch.setattr(host_info, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(software, "installed", lambda package: libtpu)
    monkeypatch.setattr(os, "environ", {"JAX_PLATFORMS": given} if given else {})
    software.keep_to_cpu_without_gpus()
    assert os.environ.get("JAX_PLATFORMS") == platforms
