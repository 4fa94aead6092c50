"""Predictions by several processes: the same rows, and the error of a process is raised by the caller."""

import multiprocessing
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podscale.errors import InputError
from podscale.prediction.predict import predict
from podscale.prediction.predictor import PredictOptions
from tests.support.prediction import assert_same_rows, write_model_run, write_photo_folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of 23 photographs and all odd images, in folders a, b and odd."""
    return write_photo_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def model_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run; copy it before changing it."""
    config = write_model_run(tmp_path_factory.mktemp("model"))
    return Path(config.run.workspace) / "runs" / config.run.id


def test_rows_do_not_depend_on_the_processes(model_run: Path, photos: Path) -> None:
    alone, shared = (
        list(predict(model_run, [str(photos)], PredictOptions(batch=2, processes=processes))) for processes in (1, 2)
    )
    assert_same_rows(shared, alone)
    assert sum(row.failure is None for row in alone) > 23


def test_an_error_of_a_process_is_raised_here(model_run: Path, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(model_run / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError) as refusal:
        list(predict(tmp_path, [str(photos)], PredictOptions(processes=2)))
    assert refusal.value.field == str(tmp_path / "model" / "model.safetensors")


def test_the_error_of_a_process_is_raised_while_chunks_are_sent(model_run: Path, tmp_path: Path) -> None:
    """A slow list: the processes have exited before they are sent all of it."""
    shutil.copytree(model_run / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")

    earlier = set(multiprocessing.active_children())  # of other tests

    def lines() -> Iterator[str]:
        yield from ["a.jpg\n"] * 2
        while set(multiprocessing.active_children()) - earlier:
            time.sleep(0.01)
        yield from ["a.jpg\n"] * 2

    with pytest.raises(InputError) as refusal:
        list(predict(tmp_path, ["-"], PredictOptions(processes=2, batch=1), lines=lines()))
    assert refusal.value.field == str(tmp_path / "model" / "model.safetensors")
