"""A run with a model of random weights, shared by the tests of predictions."""

from pathlib import Path

import pytest

from tests.support.prediction import write_model_run


@pytest.fixture(scope="session")
def model_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run; copy it before changing it."""
    config = write_model_run(tmp_path_factory.mktemp("model"))
    return Path(config.run.workspace) / "runs" / config.run.id
