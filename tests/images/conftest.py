"""Fixtures: the container engine, and the built images."""

from pathlib import Path

import pytest

from tests.support.containers import Engine, find_engine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return find_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(params=["base", "tools", "gpu", "tpu", "gpu-jax"])
def name(request: pytest.FixtureRequest) -> str:
    """Name of each image in turn, without `podscale-`."""
    return str(request.param)


@pytest.fixture
def image(engine: Engine, name: str) -> str:
    return engine.image(name)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Folder that the images' user may write to."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    folder.chmod(0o777)
    return folder
