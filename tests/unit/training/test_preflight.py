"""A training on CPUs that does not fit the memory is refused before it starts, with settings that do; the estimate."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podscale.cli import main
from podscale.config import ModelSection, RunConfig, TrainSection, data_fingerprint, load
from podscale.errors import InputError
from podscale.launch import supervisor
from podscale.models import model_spec
from podscale.pipelines import presets
from podscale.runs import StageOutcome, stage_outcomes
from podscale.stages import local
from podscale.stages.known_data import start_problems
from podscale.training.preflight import (
    EXTRA_BYTES,
    MIN_PASS_IMAGES,
    MemoryEstimate,
    estimate_memory,
    matrix_bytes,
    node_memory,
    state_bytes,
    training_memory_problems,
)
from podscale.training.shampoo import preconditioner_elements
from podscale.util import env, host_info
from tests.support.refusals import refused

GIB = 2**30
SetFree = Callable[..., None]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SetFree:
    """A machine with this much free memory, in GiB, and no GPU unless said."""

    def machine(gib: float, gpus: int = 0) -> None:
        memory = host_info.MemoryInfo(round(2 * gib * GIB), round(gib * GIB), 2**40)
        monkeypatch.setattr(host_info, "memory_info", lambda: memory)
        monkeypatch.setattr(host_info, "visible_gpus", lambda: gpus)

    monkeypatch.delenv(env.IGNORE_MEMORY, raising=False)
    return machine


def folder(*changes: str) -> RunConfig:
    return load(presets.resolve_preset("imagefolder"), changes)


def problem(config: RunConfig) -> InputError:
    (error,) = training_memory_problems(config)
    return error


def options_in(hint: str) -> list[str]:
    """Return the options of a text, without values."""
    return re.findall(r"\b(?:train|input|model)\.[a-z0-9_.]+[a-z_]", hint)


def test_what_fits_is_not_refused(free: SetFree) -> None:
    free(19.1)
    assert list(training_memory_problems(folder("train.global_batch=128"))) == []
    free(1.5)
    assert list(training_memory_problems(load(presets.resolve_preset("digits")))) == []


def test_the_proposed_settings_are_computed_and_fit(free: SetFree) -> None:
    """The case of the dry run that computed 21.5 GiB against 19.1 GiB and went on."""
    free(19.1)
    config = folder()
    error = problem(config)
    assert (error.field, error.got) == ("train.global_batch", 256)
    assert re.findall(r"[0-9.]+ GiB", error.problem) == ["21.7 GiB", "19.1 GiB"]
    for setting in ("train.accumulation=2 (10.9 GiB)", "model.name=resnet18", "input.image_size=128"):
        assert setting in error.hint
    assert f"{env.IGNORE_MEMORY}=1" in error.hint
    for changes in (["train.accumulation=2"], ["model.name=resnet18", "input.image_size=128"]):
        changed = folder(*changes)
        assert node_memory(changed, 1000) + EXTRA_BYTES < 19.1 * GIB
        assert list(training_memory_problems(changed)) == []


@pytest.mark.parametrize(
    ("changes", "gib", "accumulation"),
    [
        ([], 6.0, 8),  # 4 passes take 5.6 GiB by the estimate, and EXTRA_BYTES more
        (["train.accumulation=2"], 8.0, 4),
        (["train.global_batch=192"], 8.0, 3),
        (["launch.processes=2"], 19.1, 2),
        (["train.global_batch=250"], 19.1, 2),
    ],
)
def test_the_fewest_passes_that_fit(free: SetFree, changes: list[str], gib: float, accumulation: int) -> None:
    free(gib)
    found = re.search(r"train\.accumulation=(\d+)", problem(folder(*changes)).hint)
    assert found is not None
    assert int(found[1]) == accumulation


def test_the_batch_of_a_phase_is_named_if_it_needs_most(free: SetFree) -> None:
    free(19.1)
    phase = "{start: 1, global_batch: 256}"
    grown = folder("train.global_batch=64", f"train.phases=[{phase}]")
    error = problem(grown)
    assert (error.field, error.got) == ("train.phases.0.global_batch", 256)
    assert "train.accumulation=2 (10.9 GiB)" in error.hint
    own = folder("train.global_batch=64", f"train.phases=[{phase[:-1]}, accumulation: 1}}]")
    own = own.model_copy(update={"train": own.train.model_copy(update={"accumulation": 2})})
    assert "train.accumulation" not in problem(own).hint, "it does not change that pass"
    free(0.2)
    assert options_in(problem(grown).hint) == ["train.phases.0.global_batch", "input.image_size"]


def test_no_pass_gets_too_few_images_for_batch_norm(free: SetFree) -> None:
    free(2.0)
    error = problem(folder())
    assert "train.accumulation" not in error.hint  # 32 passes of MIN_PASS_IMAGES images take too much yet
    assert node_memory(folder(f"train.accumulation={256 // MIN_PASS_IMAGES}"), 1000) + EXTRA_BYTES > 2 * GIB
    free(0.2)
    assert options_in(problem(folder()).hint) == ["train.global_batch", "input.image_size"]


def test_a_gpu_jax_and_the_user_are_not_asked(free: SetFree, monkeypatch: pytest.MonkeyPatch) -> None:
    free(1.0, gpus=1)
    assert list(training_memory_problems(folder())) == []
    free(1.0)
    assert list(training_memory_problems(folder("train.engine=jax"))) == []
    monkeypatch.setenv(env.IGNORE_MEMORY, "1")
    assert list(training_memory_problems(folder())) == []


def test_a_finished_training_needs_no_memory(
    free: SetFree, make_shard_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free(0.01)
    config = load(presets.resolve_preset("digits"), [f"run.workspace={tmp_path}"])
    make_shard_set(name=f"datasets/{data_fingerprint(config.data)}")
    assert len(list(start_problems(config, "here", fresh=False))) == 1
    done = StageOutcome("train", 0, "", 1.0, "2026-01-01T00:00:00+00:00")
    monkeypatch.setattr(stage_outcomes, "finished_outcome", lambda config, stage, shard_set: done)
    assert list(start_problems(config, "here", fresh=False)) == []
    assert len(list(start_problems(config, "here", fresh=True))) == 1


@pytest.mark.parametrize("arguments", [["--dry-run"], []])
def test_dry_run_and_run_say_so(
    free: SetFree, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    free(19.1)
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    source = ["--set", f"data.source={tmp_path}/photos", "--set", f"run.workspace={tmp_path}"]
    code = main(["run", "imagefolder", *source, *arguments])
    printed = capsys.readouterr()
    assert code == (0 if arguments else 2)
    text = printed.out if arguments else printed.err
    assert "21.7 GiB" in text
    assert "19.1 GiB" in text
    assert not (tmp_path / "runs").exists()


LARGE = ("train.global_batch=32", "model.width=64", "input.image_size=64")


def test_the_stage_refuses_on_this_machine_and_not_in_a_pod(
    free: SetFree, make_shard_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free(0.45)
    started: list[str] = []
    failed = SimpleNamespace(exit_code=1, is_leader=True)
    monkeypatch.setattr(
        supervisor, "supervise_stage", lambda config, stage, *rest, **options: started.append(stage) or failed
    )
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    config = load(presets.resolve_preset("digits"), [f"run.workspace={tmp_path}", *LARGE])
    shard_set = str(make_shard_set(shards=2))
    with refused("GiB", field="train.global_batch"):
        local._supervise(config, "train", shard_set, None)
    assert started == []
    monkeypatch.setattr(local, "_check_models", lambda config: None)
    local._supervise(config, "evaluate", shard_set, None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    local._supervise(config, "train", shard_set, None)
    assert started == ["evaluate", "train"]


@pytest.mark.parametrize(
    ("changes", "weights", "optimizer"),
    [
        ({}, 8, 4),
        ({"optimizer": {"name": "lamb"}}, 8, 8),
        ({"optimizer": {"name": "adam"}}, 8, 8),
        ({"optimizer": {"name": "shampoo"}}, 8, 4),
        ({"optimizer": {"name": "shampoo", "shampoo": {"graft": "adagrad"}}}, 8, 8),
        ({"optimizer": {"name": "nlcg"}}, 8, 12),
        ({"optimizer": {"name": "nlcg", "nlcg": {"beta": "polak_ribiere"}}}, 8, 16),
        ({"optimizer": {"name": "neumann"}}, 8, 8),
        ({"optimizer": {"name": "muon"}}, 8, 4),
        ({"optimizer": {"name": "sgd", "shampoo": {"graft": "adagrad"}, "nlcg": {"beta": "polak_ribiere"}}}, 8, 4),
        ({"weight_update": "sharded"}, 8, 4 / 32),
        ({"weight_update": "sharded", "all_reduce": {"algorithm": "torus2d"}}, 8, 4 / 8),
        ({"weight_update": "sharded", "all_reduce": {"algorithm": "torus2d", "row": 4}}, 8, 4 / 4),
        ({"weight_update": "sharded", "weight_gather": "bf16"}, 10, 8 / 32),
        ({"weight_update": "sharded", "weight_gather": "bf16", "precision": "bf16-pure"}, 6, 8 / 32),
        ({"precision": "bf16-pure"}, 10, 4),
        ({"ema": {"decay": 0.9}}, 8, 8),
        ({"ema": {"decay": 0.9}, "weight_update": "sharded"}, 8, 8 / 32),
        ({"layer_decay": 0.5}, 8, 12),
        ({"learning_rate_scale": {"head": 2}, "weight_update": "sharded"}, 8, 12 / 32),
    ],
)
def test_bytes_per_weight_of_each_optimizer(changes: dict[str, Any], weights: int, optimizer: float) -> None:
    train = TrainSection.model_validate(changes)
    assert state_bytes(train, 3200, ranks=32, per_node=8) == (3200 * weights, 3200 * optimizer)


@pytest.mark.parametrize("ranks", [1, 4])
def test_shampoos_matrices_are_the_roots_and_a_part_of_the_statistics(ranks: int) -> None:
    """Computed by hand for one layer; tests/unit/pytorch/optim/test_shampoo.py compares with the optimizer's state."""
    train = TrainSection.model_validate({"optimizer": {"name": "shampoo", "shampoo": {"block": 16, "vectors": False}}})
    small = model_spec(ModelSection(name="resnet18", stem="small", width=4), 10)
    names = {p.name: p.shape for p in small.parameters}
    assert names["layer4.0.conv1.weight"] == (32, 16, 3, 3)  # (9, 16, 32): two blocks of (9, 16, 16)
    one = preconditioner_elements(names["layer4.0.conv1.weight"], 16, vectors=False)
    assert one == 2 * (9**2 + 16**2 + 16**2)
    elements = sum(preconditioner_elements(shape, 16, vectors=False) for shape in names.values())
    assert elements > one
    assert matrix_bytes(train, small, ranks) == 4 * elements * (1 + ranks) // ranks
    assert matrix_bytes(TrainSection(), small, ranks) == 0


def test_activations_are_those_of_the_largest_pass() -> None:
    """The batch grows fourfold: memory too, unless the accumulation grows as well."""

    def activations(*phases: dict[str, Any], batch: int = 64) -> int:
        train = {"epochs": 4, "global_batch": batch, "phases": phases}
        return estimate_memory(RunConfig.model_validate({"train": train}), 10, 1).activations

    later = {"start": 2, "global_batch": 256}
    assert activations(later) == activations(batch=256) == 4 * activations()
    assert activations({**later, "accumulation": 4}) == activations()
    assert activations({**later, "accumulation": 4}, {"start": 3, "accumulation": 1}) == activations(batch=256)


def test_frozen_parameters_have_no_gradients_and_no_optimizer_state() -> None:
    def memory(*freeze: str) -> MemoryEstimate:
        model = {"name": "resnet18", "stem": "small", "width": 16}
        return estimate_memory(RunConfig.model_validate({"model": model, "train": {"freeze": freeze}}), 10, 1)

    head = 128 * 10 + 10
    frozen = model_spec(ModelSection(name="resnet18", stem="small", width=16), 10).num_parameters - head
    whole, probe = memory(), memory("*", "!head")
    assert probe.optimizer == 4 * head
    assert (whole.weights - probe.weights, whole.optimizer - probe.optimizer) == (4 * frozen, 4 * frozen)
    assert 0 < probe.activations < whole.activations / 8
