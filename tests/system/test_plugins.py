"""A plug-in package, installed into a folder, in a small run of two processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "support" / "plugin_package"
SCRIPT = """
import json, sys
import podscale

config = podscale.load({
    "run": {"workspace": sys.argv[1]},
    "data": {"source": "40", "format": "plugin:stripes"},
    "input": {"image_size": 16, "augment": {"policy": "plugin:shift", "options": {"by": 8}}},
    "model": {"name": "plugin:tiny", "options": {"channels": 4}},
    "train": {
        "epochs": 20, "global_batch": 8, "optimizer": {"name": "plugin:sign-sgd", "options": {"scale": 0.1}},
        "schedule": {"learning_rate": 0.1, "warmup_epochs": 0}, "weight_update": "sharded",
    },
    "evaluate": {"every_epochs": 0, "crop_fraction": 1.0},
    "launch": {"processes": 2, "threads": 1},
})
shards = podscale.shard(config)
run = podscale.train(config)
predictions = list(podscale.predict(run, shards.location + "/validation"))
print(json.dumps({
    "images": shards.images,
    "plugins": run.config.run.plugins,
    "evaluation": run.metrics("evaluation")[-1],
    "right": sum(one.classes[0] == one.label for one in predictions) / len(predictions),
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the installed package."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PACKAGE, folder / "source")
    command = [
        *(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation"),
        *("--python", sys.executable, "--target", str(folder / "site"), str(folder / "source")),
    ]
    subprocess.run(command, check=True, timeout=120)
    return folder / "site"


@pytest.mark.slow
def test_a_run_with_a_plugin_of_each_kind(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    variables = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "script.py", "work"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert sum(result["images"].values()) == 80
    assert set(result["plugins"].values()) == {"podscale-example 1.0"}
    assert len(result["plugins"]) == 4
    assert result["evaluation"]["top1"] == result["right"] > 0.9
