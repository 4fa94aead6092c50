"""Evaluation of an ensemble: averaged predictions, a model of the mean weights, and refused models."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from podscale.config import RunConfig
from podscale.data.loaders.base import Batch
from podscale.data.shard_set import ShardSet
from podscale.distributed.worker_env import WorkerEnv
from podscale.evaluation import evaluation_json
from podscale.pytorch.device_prefetcher import DevicePrefetcher
from podscale.pytorch.ensemble_evaluation import LogitAverage, evaluate_ensemble
from podscale.pytorch.evaluator import Evaluator
from podscale.pytorch.precision import Precision
from podscale.pytorch.train_state import load_weights_file
from podscale.pytorch.trainer import build_model_on_device
from podscale.pytorch.world import join_world, leave_world
from podscale.report.page import build_report
from podscale.runs import RunDirectory, ensemble_members, predictions
from podscale.runs.model_files import WEIGHTS_FILE, read_evaluated_models
from podscale.runs.predictions import COMBINE_METHODS, pass_predictions_path, read_passes
from podscale.training.step_timer import untimed
from tests.support.engines import small, train_in_torch
from tests.support.refusals import refused

CYCLES = {"cycles": [1, 1, 1], "collapse": {"epochs": 1, "weight_decay_factor": 3}}


def document(workspace: Path, **changes: Any) -> RunConfig:
    values = small(workspace).model_dump(exclude_unset=True)
    del values["train"]["epochs"]
    values["train"]["schedule"] = {"learning_rate": 0.1, "warmup_epochs": 0.5}
    values |= {"ensemble": CYCLES, "evaluate": {"batch": 4, "statistics_images": 32, **changes}}
    return RunConfig.model_validate(values)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """Train three collapsed members, the first with a running average. Returns the document and the shards."""
    from tests.support.shard_set import make_shard_set

    workspace = tmp_path_factory.mktemp("together")
    config, shards = document(workspace), make_shard_set(workspace / "shards")
    train_in_torch(config, shards)
    for member in ensemble_members.ensemble_members(config):
        averaged = {"ema": {"decay": 0.5}} if member.cycle == 0 else {}
        values = member.config.model_dump()
        values["train"] |= averaged
        train_in_torch(RunConfig.model_validate(values), shards)
    return config, shards


def evaluated(config: RunConfig, shards: Path) -> evaluation_json.Evaluation:
    """Run the evaluation stage of worker and parent, in a world of one."""
    run, shard_set = RunDirectory.for_config(config).create(), ShardSet.open(shards)
    worker_env = WorkerEnv(config, "evaluate", str(shards), run.path / "ranks")
    worker_env.rank_directory.mkdir(exist_ok=True)
    try:
        evaluate_ensemble(worker_env, join_world(60.0, {}), shard_set, run)
    finally:
        leave_world()
    return evaluation_json.evaluate_run(run.path, config, shard_set)


def logits_of(config: RunConfig, shards: Path, weights: Path) -> dict[int, np.ndarray[Any, Any]]:
    """Return the logits of one model for each sample by key, in float64."""
    shard_set = ShardSet.open(shards)
    try:
        world = join_world(60.0, {})
        model = build_model_on_device(config, world, len(shard_set.classes))
        load_weights_file(model, weights)
        evaluator = Evaluator(config, world, shard_set, Precision("fp32", world.device), DevicePrefetcher(world))
        logits_by_key = {}
        for batch, logits in evaluator.logits(model, untimed):
            real = batch.host_batch.weights > 0
            logits_by_key |= zip(batch.host_batch.keys[real].tolist(), logits.double().numpy()[real], strict=True)
        evaluator.close()
    finally:
        leave_world()
    return logits_by_key


def softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(raised / raised.sum(-1, keepdims=True))


def test_averaged_predictions_equal_numpys(trained: tuple[RunConfig, Path]) -> None:
    """Averages equal NumPy's in float64, and the scores follow from the predictions."""
    config, shards = trained
    ensemble = evaluated(config, shards).ensemble
    assert ensemble is not None
    run, models = RunDirectory.for_config(config), [m.model for m in ensemble_members.ensemble_members(config)]
    each = [logits_of(config, shards, model / WEIGHTS_FILE) for model in models]
    answers = {
        name: predictions.read_predictions(pass_predictions_path(run.ensemble, name)) for name in COMBINE_METHODS
    }
    for way, mean in {
        "probabilities": lambda rows: softmax(rows).mean(0),
        "logits": lambda rows: softmax(rows.mean(0)),
    }.items():
        for key, label, topk, confidences, loss in zip(
            *(getattr(answers[way], name).tolist() for name in ("keys", "labels", "topk", "confidences", "losses")),
            strict=True,
        ):
            expected = mean(np.stack([one[key] for one in each]))
            assert loss == pytest.approx(-np.log(expected[label]), rel=1e-5, abs=1e-6)
            np.testing.assert_allclose(confidences, expected[topk], rtol=1e-5)
            assert (np.diff(expected[topk]) <= 1e-7).all()
    assert not np.allclose(answers["probabilities"].losses, answers["logits"].losses)
    for one in ensemble.combined:
        assert one.answered.top1 == np.mean(answers[one.way].topk[:, 0] == answers[one.way].labels)
        assert one.answered.loss == pytest.approx(answers[one.way].losses.mean(), rel=1e-6)
    firsts = [np.array([int(one[key].argmax()) for key in answers["logits"].keys.tolist()]) for one in each]
    assert ensemble.disagreement == [[float(np.mean(a != b)) for b in firsts] for a in firsts]
    assert ensemble.disagreement[0][2] > 0


def test_costs_and_origins_of_the_members_are_reported(trained: tuple[RunConfig, Path]) -> None:
    config, shards = trained
    evaluation = evaluated(
        config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"combine": "logits"})}), shards
    )
    ensemble = evaluation.ensemble
    assert ensemble is not None
    passes = read_passes(RunDirectory.for_config(config).ensemble)
    assert list(passes) == ["member-0", "member-1", "member-2", "average-0", "weights"]
    costs = {one.way: one.answered for one in ensemble.combined}
    assert [costs[way].passes for way in COMBINE_METHODS] == [3, 3, 1]
    seconds = sum(passes[f"member-{number}"].seconds for number in range(3))
    assert costs["logits"].images_per_second == pytest.approx(evaluation.scores.samples / seconds)
    assert costs["weights"].images_per_second == pytest.approx(evaluation.scores.samples / passes["weights"].seconds)
    scores, cost = evaluation.scores, costs["logits"]
    assert (scores.top1, scores.loss) == (cost.top1, pytest.approx(cost.loss))
    assert [(m.name, m.started_from, m.started_epoch, m.epochs) for m in ensemble.members] == [
        (f"tiny-c{cycle}", "tiny", cycle + 1.0, 1.0) for cycle in range(3)
    ]
    assert ensemble.epochs == 3 + 3  # members share cycles
    assert ensemble.members[0].average is not None
    assert ensemble.members[0].average.loss != ensemble.members[0].answered.loss
    assert ensemble.members[1].average is None
    page = build_report(RunDirectory.for_config(config).path, shards).read_text()
    for text in ("Ensemble", "tiny-c2, from epoch 3 of tiny", "mean of logits", "running average", "Disagreement"):
        assert text in page, text


def test_the_mean_model_has_its_own_statistics(trained: tuple[RunConfig, Path]) -> None:
    config, shards = trained
    evaluated(config, shards)
    mean = load_file(RunDirectory.for_config(config).ensemble / "mean" / WEIGHTS_FILE)
    members = [load_file(one.model / WEIGHTS_FILE) for one in ensemble_members.ensemble_members(config)]
    assert mean.keys() == members[0].keys()
    for name, values in mean.items():
        by_hand = np.mean([one[name].astype(np.float64) for one in members], axis=0)
        if "running" in name:
            assert not np.allclose(values, by_hand, rtol=1e-3), name
        else:
            np.testing.assert_allclose(values, by_hand, rtol=1e-6, atol=1e-8, err_msg=name)
    assert all((values > 0).all() for name, values in mean.items() if "running_var" in name)


def test_any_models_can_form_an_ensemble(trained: tuple[RunConfig, Path], tmp_path: Path) -> None:
    """Models are named by directory, and compared with a single model. A copied model directory is enough."""
    config, shards = trained
    first, second, _ = (member.model for member in ensemble_members.ensemble_members(config))
    shutil.copytree(second, tmp_path / "alone")
    named = {"models": (str(first), str(tmp_path / "alone")), "baseline": "tiny"}
    values = config.model_dump() | {"ensemble": {}, "run": {**config.run.model_dump(), "id": "two"}}
    values["evaluate"] |= named
    values["checkpoint"] |= {"snapshots": ()}
    ensemble = evaluated(RunConfig.model_validate(values), shards).ensemble
    assert ensemble is not None
    assert [member.directory for member in ensemble.members] == list(named["models"])
    assert ensemble.epochs == 2 + 2
    assert ensemble.baseline is not None
    assert (ensemble.baseline.name, ensemble.baseline.epochs) == ("tiny", 3.0)


@pytest.mark.parametrize(
    ("change", "file", "named"),
    [
        ({"classes": ["ant", "bee", "cat", "eel"]}, "", ["'eel'", "'dog'", "class 3 "]),
        ({"classes": ["ant", "bee", "cat"]}, "", ["'dog'", "class 3 "]),
        ({"preprocessing": {"image_size": 32}}, "", ["image_size 32 ", " 16"]),
        ({"preprocessing": {"interpolation": "bicubic"}}, "", ["interpolation bicubic ", " bilinear"]),
        ({"preprocessing": {"per_image_standardization": True}}, "", ["per_image_standardization True ", " False"]),
        ({"preprocessing": {"mean": [0, 0, 0]}}, "", ["mean [0, 0, 0] "]),
        ({"architecture": {"name": "vgg"}}, "model.json", []),
        (None, "model", ["podscale collapse"]),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    change: dict[str, Any] | None, file: str, named: list[str], trained: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    config, shards = trained
    first, second, _ = (member.model for member in ensemble_members.ensemble_members(config))
    odd = tmp_path / "odd"
    shutil.copytree(second, odd)
    if change is None:
        (odd / "model.json").unlink()
    else:
        described = json.loads((odd / "model.json").read_text())
        for key, value in change.items():
            described[key] = {**described[key], **value} if isinstance(value, dict) else value
        (odd / "model.json").write_text(json.dumps(described))
    asked = config.evaluate.model_copy(update={"models": (str(first), str(odd))})
    with refused(*named, field=odd / file):
        read_evaluated_models(config.model_copy(update={"evaluate": asked}), ShardSet.open(shards).classes)


def test_probabilities_are_averaged_without_underflow() -> None:
    """Two members certain of different classes give half each, though each has exp(-200) for the other's class."""
    rows = Batch(None, np.array([0]), np.array([7], np.uint64), np.ones(1, np.float32), 0)
    votes = LogitAverage()
    for logits in ([200.0, 0.0, -300.0], [0.0, 200.0, -300.0]):
        votes.start_member()
        votes.add(rows, torch.tensor([logits]))
    (answers,) = votes.columns("probabilities")
    np.testing.assert_allclose(answers["confidences"][0], [0.5, 0.5, 0.0])
    assert answers["topk"][0].tolist() == [0, 1, 2]
    assert answers["losses"][0] == pytest.approx(np.log(2))
