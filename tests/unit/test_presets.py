"""The run documents that come with Podscale are valid, documented and found by name."""

import difflib
from pathlib import Path

import pytest

from podscale.config import load
from podscale.config.preflight import find_problems
from podscale.errors import InputError
from podscale.pipelines import presets
from podscale.pipelines.presets import DIRECTORY, claim_line, names, resolve


@pytest.mark.parametrize("name", names())
def test_every_preset_is_a_valid_document_with_a_head(name):
    config = load(resolve(name))
    assert config.run.id == name, "a preset's run is called as the preset"
    head = (DIRECTORY / f"{name}.yaml").read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in head)
    assert any(f"podscale run {name}" in line or name == presets.DEFAULT for line in head), "the head shows the command"
    assert 10 < len(claim_line(name)) < 120


@pytest.mark.parametrize("name", names())
def test_a_claim_names_its_source(name):
    claim = load(resolve(name)).claim
    if claim != type(claim)():
        assert claim.source
        assert claim.hardware


def test_the_default_preset_runs_anywhere(tmp_path):
    config = load(resolve(None), [f"run.workspace={tmp_path}"])
    assert config.data.source == "digits"
    assert config.launch.processes == 2
    assert find_problems(config, "here") == []


def test_the_classic_recipe_is_goyals():
    config = load(resolve("imagenet-resnet50-90epochs"))
    train = config.train
    assert train.schedule.learning_rate == pytest.approx(0.1 * train.global_batch / 256)
    assert train.global_batch == 8192
    assert train.global_batch == 32 * config.launch.processes * config.launch.nodes, "32 images a worker"
    assert (train.epochs, train.schedule.milestones, train.schedule.warmup_epochs) == (90, (30, 60, 80), 5)
    assert find_problems(config, "cluster") == []


def test_names_and_paths(tmp_path, monkeypatch):
    assert resolve(None) == resolve("digits") == DIRECTORY / "digits.yaml"
    (tmp_path / "mine.yaml").write_text("run: {id: mine}\n")
    assert resolve(str(tmp_path / "mine.yaml")) == tmp_path / "mine.yaml"
    assert resolve("not-there.yaml") == Path("not-there.yaml"), "load says that the file is missing"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").write_text("run: {id: own}\n")
    assert resolve("digits") == Path("digits"), "a file of that name in this folder wins"
    with pytest.raises(InputError, match=r"did you mean imagenette\?"):
        resolve("imagenete")
    with pytest.raises(InputError, match="presets: digits, imagefolder"):
        resolve("zzz")


def test_presets_do_not_differ_by_accident():
    """A preset that is nearly another one is a --set, not a preset."""
    texts = {name: (DIRECTORY / f"{name}.yaml").read_text() for name in names()}
    for first in texts:
        for second in texts:
            if first < second:
                assert difflib.SequenceMatcher(None, texts[first], texts[second]).ratio() < 0.9
