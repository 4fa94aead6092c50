"""Evaluation in the JAX engine: every sample once on any number of devices, with the other engine's predictions."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh

from podscale import models
from podscale.config import RunConfig
from podscale.data.shard_set import ShardSet
from podscale.jax.evaluator import Evaluator, batch_predictions, build_eval_step
from podscale.jax.flat_buffers import ParamLayout
from podscale.jax.mesh import mesh_for_config, put_replicated
from podscale.jax.models import initialise
from podscale.jax.train_step import build_layout
from podscale.pytorch.evaluator import batch_predictions as torchs_answers
from podscale.runs.predictions import Predictions
from podscale.training.step_timer import untimed
from tests.support.engines import document, jax_world
from tests.support.shard_set import make_shard_set

pytestmark = [pytest.mark.timeout(600), pytest.mark.shallow]


class Evaluating:
    """Evaluator over a number of devices, and the arrays of an untrained network."""

    def __init__(self, config: RunConfig, shards: Path, devices: int) -> None:
        world, shard_set = jax_world(devices), ShardSet.open(shards)
        mesh = mesh_for_config(config, world.devices)
        self.seen: list[int] = []
        layout, network = network_of(config, mesh, len(shard_set.classes))
        self.evaluator = Evaluator(config, world, mesh, layout, shard_set, self.seen.append)
        self.network: Any = put_replicated(network, mesh)

    def predict(self) -> Predictions:
        answers = self.evaluator.predict(*self.network, untimed)
        assert answers is not None
        return answers.sorted_by_key()


def network_of(config: RunConfig, mesh: Mesh, classes: int) -> tuple[ParamLayout, Any]:
    """Return the layout of an untrained network, and its buckets and running statistics in host memory."""
    layout = build_layout(config, mesh, models.model_spec(config.model, classes))
    parameters, statistics = initialise(config.model, classes, seed=2)
    generator = np.random.default_rng(0)
    parameters["fc.weight"] = generator.standard_normal(parameters["fc.weight"].shape, np.float32)
    return layout, (layout.pack_on_host(parameters), statistics)


def test_with_flip_an_image_and_its_mirror_image_get_the_same_predictions(tmp_path: Path) -> None:
    """The logits of both are averaged, so it does not matter which of them is read."""
    config = document(tmp_path, evaluate__flip=True)
    mesh = mesh_for_config(config, jax_world(1).devices)
    layout, network = network_of(config, mesh, 3)
    answers = build_eval_step(config, mesh, layout)
    images = np.random.default_rng(1).integers(0, 256, (1, 4, 16, 16, 3), dtype=np.uint8)
    labels, quiet = np.array([[0, 1, 2, 0]]), np.zeros(1, np.int32)
    losses, mirrored = (
        np.asarray(answers(*network, seen, labels, quiet).losses) for seen in (images, images[..., ::-1, :])
    )
    np.testing.assert_allclose(losses, mirrored, rtol=1e-4)
    assert len(set(losses.tolist())) == 4


def test_every_sample_once_on_any_number_of_devices(tmp_path: Path) -> None:
    """20 images: on 8 devices with batches of 4, some devices get only padding."""
    shards, config = make_shard_set(tmp_path / "shards"), document(tmp_path)
    keys = np.sort(ShardSet.open(shards).split("validation").keys)
    answers = {}
    for devices in (1, 8):
        evaluating = Evaluating(config, shards, devices)
        answers[devices] = evaluating.predict()
        assert sum(evaluating.seen) == 20
        np.testing.assert_array_equal(answers[devices].keys, keys)
        measured = evaluating.evaluator.evaluate(*evaluating.network, untimed)
        assert measured is not None
        assert measured.images == 20
        assert (measured.top1, measured.top5) == answers[devices].top1_top5_accuracy()
        np.testing.assert_allclose(measured.loss, answers[devices].losses.astype(np.float64).mean(), rtol=1e-6)
        evaluating.evaluator.close()
    np.testing.assert_array_equal(answers[1].topk, answers[8].topk)
    np.testing.assert_allclose(answers[1].losses, answers[8].losses, rtol=1e-5)


def test_a_stop_request_ends_the_evaluation(tmp_path: Path) -> None:
    evaluating = Evaluating(document(tmp_path), make_shard_set(tmp_path / "shards"), 1)
    asked = iter([False, True, True, True])
    assert evaluating.evaluator.evaluate(*evaluating.network, untimed, lambda: next(asked)) is None
    assert sum(evaluating.seen) < 20
    evaluating.evaluator.close()


def test_predictions_equal_those_of_the_other_engine() -> None:
    """Of equal logits the lower class comes first. With fewer than five classes, all are predicted."""
    generator = np.random.default_rng(1)
    for classes in (3, 40):
        logits = generator.integers(-3, 4, (64, classes)).astype(np.float32)  # with many equal values
        labels = generator.integers(0, classes, 64)
        topk, confidences, losses = batch_predictions(jnp.asarray(logits), jnp.asarray(labels))
        expected = torchs_answers(torch.from_numpy(logits), torch.from_numpy(labels))
        np.testing.assert_array_equal(topk, expected.topk)
        np.testing.assert_allclose(confidences, expected.confidences, rtol=1e-5)
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
