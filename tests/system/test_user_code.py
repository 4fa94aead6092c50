"""The user's own code in processes, in a run of two ranks, and in predictions and exports where the folder is gone."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import podscale
from podscale.export.export_model import export_model
from podscale.export.export_options import ExportOptions
from podscale.launch.process_cleanup import start_bound
from podscale.runs.user_code import user_code
from tests.support.refusals import refused

MODEL = """
from torch import nn

from my_net.blocks import block


def build(num_classes, width=4):
    return nn.Sequential(block(3, width), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, num_classes))
"""
BLOCKS = """
from torch import nn


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())
"""
AUGMENTATION = """
class Darker:
    draws = 1

    def __init__(self, most):
        self._most = most

    def __call__(self, image, draws):
        return image.point(lambda value: value * (1 - self._most * draws[0]))
"""


def test_processes_import_the_code_before_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory has the user's folder, as it is today; ranks start by `python -m`."""
    package = tmp_path / "my_net"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "name.py").write_text("print('as the run began')")
    monkeypatch.chdir(tmp_path)
    config = podscale.load({}, run={"workspace": "work"}, launch={"code": "my_net"})
    with user_code(config), Path("output").open("wb") as output:
        (package / "name.py").write_text("print('as it is today')")
        files = {"stdin": subprocess.DEVNULL, "stdout": output.fileno(), "stderr": subprocess.STDOUT}
        assert start_bound(["-m", "my_net.name"], os.environ, **files).wait() == 0
    assert Path("output").read_text() == "as the run began\n"


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_code_travels_with_the_run_and_its_model(tmp_path: Path) -> None:
    package = tmp_path / "my_net"
    package.mkdir()
    for name, text in {"__init__": "", "model": MODEL, "blocks": BLOCKS, "dark": AUGMENTATION}.items():
        (package / f"{name}.py").write_text(text)
    options = {
        "run": {"workspace": tmp_path / "work"},
        "input": {"image_size": 8, "augment": {"policy": "python:my_net.dark:Darker", "options": {"most": 0.5}}},
        "model": {"name": "python:my_net.model:build", "options": {"width": 6}},
        "train": {"epochs": 1, "global_batch": 64, "schedule": {"warmup_epochs": 0.5}},
        "evaluate": {"every_epochs": 0},
        "launch": {"processes": 2, "threads": 1, "code": package},
    }
    config = podscale.load(options)
    shards = podscale.shard(config)
    run = podscale.train(config)
    assert (run.model / "code.tar").exists()

    (package / "blocks.py").write_text(BLOCKS.replace("ReLU", "GELU"))
    with refused("my_net/blocks.py", field=str(run.directory)):
        podscale.train(options)
    shutil.rmtree(package)
    shutil.copytree(run.model, tmp_path / "elsewhere")
    images = f"{shards.location}/validation"
    here, elsewhere = (list(podscale.predict(model, images, limit=5)) for model in (run, tmp_path / "elsewhere"))
    assert here == elsewhere
    for model in (run.directory, tmp_path / "elsewhere"):
        options = ExportOptions(format="torchscript", out=tmp_path / "model.torchscript", images=[images], limit=5)
        assert export_model(model, options).agreement.top1_equal == 5
    (tmp_path / "elsewhere" / "code.tar").unlink()
    with refused("my_net", "launch.code", field="model.name"):
        next(podscale.predict(tmp_path / "elsewhere", images))
