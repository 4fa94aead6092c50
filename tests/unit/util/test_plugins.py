"""Plug-ins by entry points: found by name, named in errors with their distribution."""

import io
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import podscale
from podscale.config.outside_code import plugin_problems
from podscale.data.augment import Augmentation
from podscale.data.sources import open_source
from podscale.pytorch.models import build_model
from podscale.pytorch.optim import HyperParams, ParamShard, ParamSlice
from podscale.pytorch.optim.build_optimizer import build_optimizer
from podscale.util import plugins
from tests.support.refusals import refused

PACKAGE = Path(__file__).resolve().parents[2] / "support" / "plugin_package"
"""Example package with a plug-in of each kind."""

ENTRY_POINTS = """
[podscale.models]
tiny = plugin_of_a_test:tiny
broken = plugin_of_a_test_that_is_missing:tiny
value = plugin_of_a_test:VALUE

[podscale.sources]
stripes = plugin_of_a_test:tiny

[podscale.optimizers]
sign-sgd = plugin_of_a_test:optimizer
"""
MODULE = """
VALUE = 1
def tiny(num_classes, channels=8): ...
def optimizer(shard, scale=1.0): return scale
def __getattr__(name):
    if name == "imported_at_first_use":
        import module_that_is_missing
    raise AttributeError(name)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of a distribution on the import path."""
    write_distribution(tmp_path, "podscale-test-plugin", "1.2", ENTRY_POINTS)
    (tmp_path / "plugin_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.installed_plugins.cache_clear()
    yield tmp_path
    plugins.installed_plugins.cache_clear()


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example package on the import path, with the metadata of an installation."""
    groups = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    write_distribution(tmp_path, "podscale-example", "1.0", "\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(PACKAGE))
    plugins.installed_plugins.cache_clear()
    yield
    plugins.installed_plugins.cache_clear()


def write_distribution(folder: Path, name: str, version: str, entry_points: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_a_document_records_the_distribution_of_its_plugins(installed: Path) -> None:
    config = podscale.load({}, model={"name": "plugin:tiny"}, data={"format": "plugin:stripes"})
    assert config.run.plugins == {
        "podscale.models:tiny": "podscale-test-plugin 1.2",
        "podscale.sources:stripes": "podscale-test-plugin 1.2",
    }
    assert podscale.load(config, model={"name": "resnet18"}).run.plugins.keys() == {"podscale.sources:stripes"}
    assert podscale.load("digits").run.plugins == {}


@pytest.mark.usefixtures("example")
def test_a_plugin_of_each_kind_is_built() -> None:
    config = podscale.load(
        {"data": {"source": "3", "format": "plugin:stripes"}},
        input={"augment": {"policy": "plugin:shift", "options": {"by": 8}}},
        model={"name": "plugin:tiny", "options": {"channels": 4}},
        train={"optimizer": {"name": "plugin:sign-sgd", "options": {"scale": 0.1}}},
    )
    assert set(config.run.plugins.values()) == {"podscale-example 1.0"}
    source = open_source(config.data)
    items = list(source.items())
    assert [item.label for item in items] == ["horizontal"] * 3 + ["vertical"] * 3
    image = Image.open(io.BytesIO(source.read(items[0])))
    augmentation = Augmentation(config.input.augment, 1, (0.5, 0.5, 0.5))
    (draws,) = augmentation.draws(np.zeros(1, np.int64), np.zeros(1, np.uint64))
    assert (augmentation(image, draws) != np.asarray(image)).any()
    assert build_model(config.model, 2).eval()(torch.zeros(1, 3, 16, 16)).shape == (1, 2)
    weights = torch.ones(6)
    shard = ParamShard([ParamSlice("w", 0, 6, True, True)], [(0, 6)], weights, torch.ones(6))
    hyper = HyperParams(*torch.tensor([0.5, 0.0, 0.0, 1.0]))  # learning rate 0.5, no momentum
    build_optimizer(config.train.optimizer, shard, 10.0).step(hyper, torch.tensor(True))
    torch.testing.assert_close(weights, torch.full((6,), 0.95))


@pytest.mark.parametrize(
    ("overrides", "field", "hint"),
    [
        ({"model.name": "plugin:tinny"}, "model.name", " plugin:tiny?"),
        ({"data.format": "plugin:zebra"}, "data.format", " stripes"),
        ({"train.optimizer.name": "plugin:sgn-sgd"}, "train.optimizer.name", " plugin:sign-sgd?"),
        ({"input.augment.policy": "plugin:shift"}, "input.augment.policy", " none"),
        ({"train.optimizer.name": "lasr"}, "train.optimizer.name", " lars?"),
        ({"data.format": "imagefoldr"}, "data.format", " imagefolder?"),
        ({"input.augment.options": {"by": 1}}, "input.augment.options", "only for a plug-in"),
        ({"train.optimizer.options": {"scale": 1}}, "train.optimizer.options", "only for a plug-in"),
    ],
)
def test_a_wrong_name_is_refused_with_the_likely_one(
    installed: Path, overrides: dict[str, object], field: str, hint: str
) -> None:
    with refused(hint, field=field):
        podscale.load({}, **overrides)


def test_a_plugin_that_cannot_be_imported_names_its_distribution(installed: Path) -> None:
    plugin = plugins.find_plugin("model.name", "broken")
    with refused("podscale-test-plugin 1.2", "ModuleNotFoundError", field="model.name"):
        plugin.load()
    with refused("podscale-test-plugin 1.2", "not callable", field="model.name"):
        plugins.find_plugin("model.name", "value").load()


def test_two_distributions_with_one_name_are_refused(installed: Path) -> None:
    write_distribution(installed, "another-plugin", "0.1", ENTRY_POINTS)
    with refused("another-plugin 0.1", "podscale-test-plugin 1.2", field="model.name"):
        plugins.find_plugin("model.name", "tiny")


def test_options_that_a_plugin_does_not_take(installed: Path) -> None:
    plugin = plugins.find_plugin("train.optimizer.name", "sign-sgd")
    assert plugins.call_plugin(plugin, object(), options={"scale": 2.0}, options_field="o") == 2.0
    with refused(" scale?", field="train.optimizer.options"):
        plugins.call_plugin(plugin, object(), options={"scal": 2}, options_field="train.optimizer.options")


def test_a_callable_of_the_users_code(installed: Path) -> None:
    config = podscale.load({}, **{"train.optimizer.name": "python:plugin_of_a_test:optimizer"})
    factory = plugins.find_factory("train.optimizer.name", config.train.optimizer.name)
    assert plugins.call_plugin(factory, object(), options={"scale": 3}, options_field="o") == 3
    problems = {
        "nothing": " nothing",
        "optimiser": " optimizer?",
        "VALUE": "not callable",
        "VALUE.nothing": " VALUE.nothing",
        "imported_at_first_use": "ModuleNotFoundError",
    }
    for name, problem in problems.items():
        with refused(problem, field="train.optimizer.name", got=f"python:plugin_of_a_test:{name}"):
            plugins.NamedCallable("train.optimizer.name", f"python:plugin_of_a_test:{name}").load()
    with refused("ModuleNotFoundError", "launch.code", field="train.optimizer.name"):
        plugins.NamedCallable("train.optimizer.name", "python:module_that_is_missing:optimizer").load()
    with refused("plugin:NAME", field="data.format"):
        podscale.load({}, **{"data.format": "python:plugin_of_a_test:tiny"})


def test_another_version_is_a_problem_of_this_machine_and_of_the_identity(installed: Path, tmp_path: Path) -> None:
    config = podscale.load({}, model={"name": "plugin:tiny"})
    assert list(plugin_problems(config)) == []
    (installed / "podscale_test_plugin-1.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: podscale-test-plugin\nVersion: 1.3\n"
    )
    metadata.MetadataPathFinder().invalidate_caches()
    plugins.installed_plugins.cache_clear()
    (problem,) = plugin_problems(config)
    assert problem.field == "model.name"
    assert "podscale-test-plugin 1.2" in str(problem)
    assert "podscale-test-plugin 1.3" in str(problem)
    assert podscale.load({}, model={"name": "plugin:tiny"}).run.plugins != config.run.plugins


def test_a_recorded_plugin_need_not_be_installed_to_read_the_document() -> None:
    recorded = {"podscale.models:absent": "elsewhere 1.0"}
    config = podscale.load({}, model={"name": "plugin:absent"}, run={"plugins": recorded})
    assert config.run.plugins == recorded
    (problem,) = plugin_problems(config)
    assert problem.field == "model.name"
