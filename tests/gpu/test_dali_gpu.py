"""DALI on a GPU: the samples and rectangles of the reference, pixels within what the GPU's JPEG decoder allows."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.config.model import RunConfig
from podscale.input import build_evaluation_loader, build_loader
from podscale.input.build import dali_installed
from podscale.order import build_order, evaluation_steps
from podscale.shards.shardset import ShardSet

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not dali_installed(), reason="DALI is not installed")]


@pytest.fixture
def device() -> str:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda:0"


@pytest.fixture
def unit(monkeypatch) -> Any:
    """The helpers of the unit tests' conftest, which no test module can import by name."""
    path = Path(__file__).parent.parent / "unit" / "conftest.py"
    spec = importlib.util.spec_from_file_location("podscale_unit_conftest", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def document(loader: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "input": {"loader": loader, "image_size": 64, "workers": 2, "max_bad_rate": 0.5},
            "train": {"global_batch": 16},
            "evaluate": {"batch": 16},
        }
    )


def run(loader: str, split: Any, device: str, *, training: bool) -> list[Any]:
    config = document(loader)
    if training:
        made = build_loader(config, split, build_order(config, split), rank=0, world=1, device=device)
        stop = 6
    else:
        made = build_evaluation_loader(config, split, rank=0, world=1, device=device)
        stop = evaluation_steps(len(split), 1, 16)
    try:
        return list(made.batches(0, stop))
    finally:
        made.close()


@pytest.mark.parametrize("training", [True, False])
def test_gpu_batches_match_the_reference(device, unit, tmp_path, training) -> None:
    directory = tmp_path / "shards"
    summary = unit.write_split(directory / "train", unit.varied_samples(40, 4), 4, 2, 0)
    unit.finish(directory, {"train": summary}, list("abcd"))
    split = ShardSet.open(directory).split("train")
    reference, batches = (
        run("torchvision", split, "cpu", training=training),
        run("dali", split, device, training=training),
    )
    for left, right in zip(reference, batches, strict=True):
        assert np.array_equal(left.keys, right.keys)
        assert np.array_equal(left.labels, right.labels)
        assert str(right.images.device) == device
        assert right.images.shape == left.images.shape
        difference = np.abs(left.images.astype(int) - right.images.cpu().numpy())
        assert difference.mean() < 2


def test_a_bad_record_is_replaced_on_the_gpu_too(device, unit, tmp_path) -> None:
    samples = unit.varied_samples(40, 4)
    samples[7] = unit.Sample(b"\0" * 200, samples[7].label, unit.image_size(samples[7].image))
    directory = tmp_path / "shards"
    unit.finish(directory, {"train": unit.write_split(directory / "train", samples, 4, 2, 0)}, list("abcd"))
    split = ShardSet.open(directory).split("train")
    reference, batches = run("torchvision", split, "cpu", training=True), run("dali", split, device, training=True)
    for left, right in zip(reference, batches, strict=True):
        assert np.array_equal(left.keys, right.keys)
