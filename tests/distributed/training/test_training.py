"""Trainings on real processes: learning, bit-exact resume, stopping, masking."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from podscale.config import RunConfig
from podscale.data.shard_set import ShardSet
from podscale.errors import InputError, PodscaleError, Preempted
from podscale.pytorch import trainer
from podscale.pytorch.device_prefetcher import DevicePrefetcher, Normalise
from podscale.pytorch.evaluator import Evaluator
from podscale.pytorch.precision import Precision
from podscale.pytorch.trainer import PyTorchTrainer, build_model_on_device, build_trainer
from podscale.pytorch.world import World
from podscale.runs import RunDirectory
from podscale.telemetry.events import filter_replays, read_records
from podscale.training.step_timer import untimed
from podscale.training.trainer import NONFINITE_MESSAGE, TrainResult
from tests.support.engines import small as document
from tests.support.engines import train_session
from tests.support.refusals import refused
from tests.support.tiny import SHALLOW

Prepare = Callable[[PyTorchTrainer], None]


def run_full_training(config: RunConfig, shards: Path, world: World, prepare: Prepare = lambda s: None) -> TrainResult:
    """Run the training stage of a worker; `prepare` may change its trainer."""
    return train_session(build_trainer, config, world, shards, prepare)


def run_training(config: RunConfig, shards: Path, world: World, prepare: Prepare = lambda s: None) -> TrainResult:
    """Run the training stage with half of the blocks of ResNet-18, which takes two thirds of the time."""
    with SHALLOW:
        return run_full_training(config, shards, world, prepare)


def before_every_step(session: PyTorchTrainer, act: Callable[[Any], None]) -> None:
    """Call `act(batch)` before each step."""
    step = session.step

    class Disturbed:
        seek = step.seek
        set_accumulation = step.set_accumulation

        def __call__(self, batch: Any, phase: Any) -> Any:
            act(batch)
            return step(batch, phase)

    session.step = Disturbed()  # type: ignore[assignment]


def stop_after(step: int, rank: int) -> Prepare:
    """Request a stop of one rank during step `step`."""

    def prepare(session: PyTorchTrainer) -> None:
        def ask(batch: Any) -> None:
            if batch.host_batch.step == step and session.world.rank == rank:
                session.stop_request.requested = True

        before_every_step(session, ask)

    return prepare


def keys_of(session: PyTorchTrainer, keys: dict[int, list[int]]) -> None:
    """Record the sample keys of every step."""
    before_every_step(session, lambda batch: keys.update({batch.host_batch.step: batch.host_batch.keys.tolist()}))


def train_recorded(
    config: RunConfig, shards: Path, world: World, prepare: Prepare = lambda s: None
) -> tuple[str, dict[int, list[int]]]:
    """Train until the end or a stop. Return the message of the stop, else "", and this rank's keys of each step."""
    keys: dict[int, list[int]] = {}

    def both(session: PyTorchTrainer) -> None:
        prepare(session)
        keys_of(session, keys)

    try:
        run_training(config, shards, world, both)
    except Preempted as error:
        return str(error), keys
    return "", keys


def final_state(config: RunConfig) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of the newest checkpoint."""
    from podscale.runs.checkpoint.format import complete_entries, read_snapshot

    return read_snapshot(complete_entries(RunDirectory.for_config(config).checkpoints)[0]).arrays


def losses_of(config: RunConfig) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in records_of(config) if line["kind"] == "step"}


def records_of(config: RunConfig) -> list[dict[str, Any]]:
    return filter_replays(read_records(RunDirectory.for_config(config).metrics))


def assert_same_bits(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not np.array_equal(actual[name], expected[name])]
    assert not different, different


def test_training_learns_and_writes_all_its_files(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    shards = make_shard_set()
    config = document(tmp_path, train__epochs=20, train__schedule__learning_rate=0.1, input__crop={"scale": (0.9, 1)})
    results = run_world(2, lambda world: run_full_training(config, shards, world))
    assert results[0] == results[1]
    losses = losses_of(config)
    assert list(losses) == list(range(1, 61))
    assert np.mean([losses[step] for step in range(56, 61)]) < 0.7 * losses[1]
    lines = records_of(config)
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert [line["step"] for line in evaluations] == [3 * epoch for epoch in range(1, 21)]
    assert evaluations[-1]["top1"] == results[0].evaluation["top1"]
    description = json.loads((RunDirectory.for_config(config).model / "model.json").read_text())
    assert description["classes"] == ["ant", "bee", "cat", "dog"]
    events = [line["event"] for line in lines if line["kind"] == "event"]
    by_chance = ("checkpoint", "straggler", "straggler_over")  # on a busy machine any rank may be slow
    assert [event for event in events if event not in by_chance] == ["start", "startup", "goodput", "done"]


def test_the_log_has_the_choice_of_how_kernels_load(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    """As a GPU would make it; here it is given."""
    facts = {"loads": "tensor descriptors", "pointers_us": "900", "descriptors_us": "800", "bits": "same"}
    shards, config = make_shard_set(), document(tmp_path, train__epochs=2)

    def body(world: World) -> None:
        with patch.object(trainer, "gemm_load_facts", lambda model: facts):
            run_training(config, shards, world)

    run_world(1, body)
    (event,) = (line for line in records_of(config) if line.get("event") == "gemm_loads")
    assert facts.items() <= event.items()


@pytest.mark.slow
def test_two_launches_give_the_bits_of_one(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    """Stopped in the middle of an epoch, on 2 and on 4 ranks, with options that have state."""
    shards = make_shard_set()
    streams = {}
    torus = {"algorithm": "torus2d", "row": 2, "bucket_mb": 0.05, "wire_column": "bf16"}
    for size, more in (
        (
            2,
            {
                "train__all_reduce": {"wire_column": "int8"},
                "train__precision": "bf16",
                "model__batch_norm": {"span": 4},  # half a rank's batch
            },
        ),
        (
            4,
            {
                "train__all_reduce": torus,
                "train__accumulation": 2,
                "model__batch_norm": {"span": 4},  # two ranks
            },
        ),
    ):
        straight = document(tmp_path / f"straight{size}", evaluate__every_epochs=2, **more)
        halted = document(tmp_path / f"halted{size}", evaluate__every_epochs=2, **more)
        uninterrupted = run_world(size, lambda world, c=straight: train_recorded(c, shards, world))
        first = run_world(size, lambda world, c=halted: train_recorded(c, shards, world, stop_after(7, world.size - 1)))
        assert all("step 10 of 12" in error for error, _ in first), first[0][0]
        second = run_world(size, lambda world, c=halted: train_recorded(c, shards, world))
        assert_same_bits(final_state(halted), final_state(straight))
        assert losses_of(halted) == losses_of(straight)
        for rank in range(size):
            assert {**first[rank][1], **second[rank][1]} == uninterrupted[rank][1]
            assert not first[rank][1].keys() & second[rank][1].keys()
        streams[size] = {step: sorted(key for _, keys in uninterrupted for key in keys[step]) for step in range(12)}
    assert streams[2] == streams[4]
    (event,) = (line for line in records_of(straight) if line.get("event") == "all_reduce_error")
    assert 1e-4 < event["relative"] < 1e-2
    assert (event["wire_row"], event["wire_column"]) == ("fp32", "bf16")


def stop_in_evaluation(step: int, rank: int, steps_seen: list[int]) -> Prepare:
    """Request a stop of one rank early in the evaluation after step `step`."""

    def prepare(session: PyTorchTrainer) -> None:
        original = session.evaluator.loader.batches

        def batches(start: int, stop: int) -> Any:
            for batch in original(start, stop):
                if session.state.progress.step == step:
                    steps_seen.append(batch.step)
                    session.stop_request.requested |= session.world.rank == rank
                yield batch

        session.evaluator.loader.batches = batches  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize("step", [6, 12])
def test_a_stop_request_ends_an_evaluation(run_world: Any, make_shard_set: Any, tmp_path: Path, step: int) -> None:
    """In the middle and at the end of a run. The next launch evaluates first, and the result is the same."""
    shards = make_shard_set()
    straight = document(tmp_path / "straight", evaluate__batch=1)
    halted = document(tmp_path / "halted", evaluate__batch=1)

    def body(world: World) -> tuple[str, int]:
        seen: list[int] = []
        with pytest.raises(Preempted) as caught:
            run_training(halted, shards, world, stop_in_evaluation(step, 1, seen))
        return str(caught.value), len(seen)

    uninterrupted = run_world(2, lambda world: run_training(straight, shards, world))
    for error, seen in run_world(2, body):
        assert f"step {step} of 12" in error
        assert seen < 10, "20 images on two ranks are 10 steps"
    assert [line for line in records_of(halted) if line["kind"] == "evaluation" and line["step"] == step] == []
    assert run_world(2, lambda world: run_training(halted, shards, world)) == uninterrupted
    assert_same_bits(final_state(halted), final_state(straight))
    measured = [
        [(line["step"], line["top1"], line["loss"]) for line in records_of(config) if line["kind"] == "evaluation"]
        for config in (halted, straight)
    ]
    assert measured[0] == measured[1]
    assert len(measured[0]) == 4


def test_resume_at_another_world_size(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    shards = make_shard_set()
    config = document(tmp_path)

    def stopped(world: World) -> str:
        with pytest.raises(Preempted):
            run_training(config, shards, world, stop_after(2, 0))
        return "stopped"

    run_world(4, stopped)
    results = run_world(2, lambda world: run_training(config, shards, world))
    assert results[0].steps == 12
    events = [line["event"] for line in records_of(config) if line["kind"] == "event"]
    assert events.count("resumed") == 1


def poison(steps: range, rank: int, *, gradients: bool = False) -> Prepare:
    """Replace one rank's normalised images by NaN in these steps; if `gradients`, one of its gradients, and no loss."""

    def prepare(session: PyTorchTrainer) -> None:
        step = -1

        def remember(batch: Any) -> None:
            nonlocal step
            step = batch.host_batch.step

        def spoil(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            return (spoil_tensor(inputs[0]) if module.training else inputs[0],)

        def spoil_tensor(values: torch.Tensor) -> torch.Tensor:
            return values * float("nan") if step in steps and session.world.rank == rank else values

        first = session.state.model.get_submodule("conv1")
        if gradients:
            first.get_parameter("weight").register_hook(spoil_tensor)
        else:
            first.register_forward_pre_hook(spoil)
        before_every_step(session, remember)

    return prepare


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_nan_on_one_rank_masks_the_step_on_all(
    run_world: Any, make_shard_set: Any, tmp_path: Path, wire: str
) -> None:
    """Also a gradient in int8 messages, which send codes. (The loss is sent in fp32, so it stays finite here.)"""
    shards = make_shard_set()
    all_reduce = {"wire_column": wire}
    config = document(tmp_path, checkpoint__every_steps=1, checkpoint__keep_last=20, train__all_reduce=all_reduce)

    bad = poison(range(4, 6), 1, gradients=wire == "int8")

    def body(world: World) -> tuple[TrainResult, dict[str, Any]]:
        live: list[PyTorchTrainer] = []
        result = run_training(config, shards, world, lambda s: (bad(s), live.append(s))[0])
        return result, {name: tensor.clone() for name, tensor in live[0].state.tensors().items()}

    (first, state), (second, other) = run_world(2, body)
    assert first.skipped == second.skipped == 2
    assert all(torch.equal(state[name], other[name]) for name in state)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())
    from podscale.runs.checkpoint.format import complete_entries, read_snapshot

    by_step = {e.step: read_snapshot(e).arrays for e in complete_entries(RunDirectory.for_config(config).checkpoints)}
    assert_same_bits(by_step[5], by_step[4])
    assert_same_bits(by_step[6], by_step[4])
    assert not np.array_equal(by_step[7]["model/fc.weight"], by_step[6]["model/fc.weight"])


def test_too_many_masked_steps_fail_the_run(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    shards = make_shard_set()
    config = document(tmp_path, train__max_nonfinite=3)

    def body(world: World) -> str:
        with refused("4 steps", field="train.max_nonfinite", got=3, kind=PodscaleError) as refusal:
            run_training(config, shards, world, poison(range(2, 12), 0))
        return refusal.text

    assert all(NONFINITE_MESSAGE in text for text in run_world(2, body))


def test_all_ranks_refuse_a_checkpoint_of_another_run(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    shards = make_shard_set()
    run_world(1, lambda world: run_training(document(tmp_path, train__epochs=2), shards, world))
    other = document(tmp_path, train__epochs=2, train__label_smoothing=0.0)

    def body(world: World) -> str:
        with pytest.raises(InputError) as caught:
            run_training(other, shards, world)
        return str(caught.value)

    assert all(re.search(r"train\.label_smoothing: .*0\.1, .*0\.0", message) for message in run_world(2, body))


def test_a_world_that_does_not_fit_is_refused(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    shards = make_shard_set()

    def body(world: World) -> list[tuple[str, object, str]]:
        messages = []
        for changes in (
            {"train__global_batch": 15},
            {"train__global_batch": 64},
            {"train__global_batch": 2},
            {"model__batch_norm": {"group": 4}},
        ):
            with pytest.raises(InputError) as caught:
                run_training(document(tmp_path, **changes), shards, world)
            messages.append((caught.value.field, caught.value.got, caught.value.problem))
        return messages

    odd, large, small, group = run_world(2, body)[0]
    assert [about[:2] for about in (odd, large, small, group)] == [
        ("train.global_batch", 15),
        ("train.global_batch", 64),
        ("train.global_batch", 2),
        ("model.batch_norm.group", 4),
    ]
    assert "= 2 x 1" in odd[2]
    assert "48 images" in large[2]
    assert "variance" in small[2]


def test_predictions_do_not_depend_on_the_world(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    """20 images on 1 and 3 ranks with batches of 4, so that the last step is padded."""
    predict_and_evaluate = partial(predictions_and_scores, document(tmp_path), make_shard_set())
    ((alone, expected),) = run_world(1, predict_and_evaluate)
    others = run_world(3, predict_and_evaluate)
    assert [predictions is None for predictions, _ in others] == [False, True, True]
    together = others[0][0]
    assert together is not None
    assert together.keys.tolist() == alone.keys.tolist() == list(range(48, 68))
    np.testing.assert_array_equal(together.topk, alone.topk)
    np.testing.assert_allclose(together.losses, alone.losses, rtol=1e-4)
    assert all(measured == pytest.approx(expected) for _, measured in others)
    assert expected[0] == pytest.approx(np.mean(alone.topk[:, 0] == alone.labels))
    assert expected[2] == pytest.approx(alone.losses.mean())
    assert expected[3] == 20


def predictions_and_scores(config: RunConfig, shards: Path, world: World) -> Any:
    model, evaluator = model_and_evaluator(config, shards, world)
    predictions, measured = evaluator.predict(model, untimed), evaluator.evaluate(model, untimed)
    evaluator.close()
    scores = (measured.top1, measured.top5, measured.loss, measured.images)
    return predictions.sorted_by_key() if predictions else None, scores


def model_and_evaluator(config: RunConfig, shards: Path, world: World) -> tuple[torch.nn.Module, Evaluator]:
    """Return a model whose classes differ, and an evaluator of the set."""
    shard_set = ShardSet.open(shards)
    model = build_model_on_device(config, world, len(shard_set.classes))
    torch.nn.init.normal_(model.get_submodule("fc").weight)
    precision = Precision("fp32", world.device)
    return model, Evaluator(config, world, shard_set, precision, DevicePrefetcher(world))


def test_with_flip_the_logits_of_an_image_and_its_mirror_image_are_averaged(
    run_world: Any, make_shard_set: Any, tmp_path: Path
) -> None:
    config = document(tmp_path, evaluate__flip=True)
    ((predicted, expected),) = run_world(
        1, partial(predicted_losses_and_those_of_mean_logits, config, make_shard_set())
    )
    np.testing.assert_allclose(predicted, expected, rtol=1e-4)


def predicted_losses_and_those_of_mean_logits(config: RunConfig, shards: Path, world: World) -> Any:
    model, evaluator = model_and_evaluator(config, shards, world)
    predicted = evaluator.predict(model, untimed)
    normalise = Normalise(config.input, world, channels_last=True)
    losses = []
    with torch.inference_mode():
        for batch in evaluator.loader.batches(0, 5):
            images = torch.from_numpy(np.concatenate([batch.images, batch.images[:, :, ::-1]]))
            logits = model.eval()(normalise(images)).chunk(2)
            mean = (logits[0] + logits[1]) / 2
            losses.append(torch.nn.functional.cross_entropy(mean, torch.from_numpy(batch.labels), reduction="none"))
    evaluator.close()
    assert predicted is not None
    return predicted.losses, torch.cat(losses).numpy()


def test_fp16_scales_its_loss(run_world: Any, make_shard_set: Any, tmp_path: Path) -> None:
    """The loss scale overflows fp16 at first: steps are masked, and the scale halves until they are finite."""
    shards = make_shard_set()
    config = document(tmp_path, train__precision="fp16", train__loss_scale=2.0**24)
    results = run_world(2, lambda world: run_training(config, shards, world))
    assert results[0] == results[1]
    assert 0 < results[0].skipped < 10
    from podscale.runs.checkpoint.format import complete_entries, read_snapshot

    meta = read_snapshot(complete_entries(RunDirectory.for_config(config).checkpoints)[0]).meta
    assert meta["precision"]["loss_scale"] == 2.0 ** (24 - results[0].skipped)
    assert meta["precision"]["finite_in_a_row"] == 12 - results[0].skipped
    assert meta["progress"]["skipped"] == results[0].skipped
    assert meta["epoch_before"] == pytest.approx(meta["epoch"] * 11 / 12, abs=1e-5)  # for `train.start_from.epoch`
