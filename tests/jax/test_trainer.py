"""Trainings of the JAX engine: equal to the other engine's, resumed to the bit, on any number of devices."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from podscale.config import RunConfig
from podscale.errors import PodscaleError, Preempted
from podscale.jax.trainer import JaxTrainer
from podscale.runs import RunDirectory
from podscale.training.trainer import NONFINITE_MESSAGE
from tests.support.engines import (
    document,
    lines_of,
    losses_of,
    state_after,
    train_in_jax,
    train_in_torch,
)
from tests.support.refusals import refused
from tests.support.shard_set import make_shard_set

pytestmark = [pytest.mark.timeout(900), pytest.mark.shallow]  # compiles whole steps, possibly on a busy machine
LARS = {"name": "lars", "trust_coefficient": 0.02, "weight_decay": 1e-3}
CIFAR: dict[str, Any] = {
    "input__crop": {"padding": 2},
    "input__interpolation": "bicubic",
    "input__per_image_standardization": True,
    "model__block": "v2",
}
"""Input and network of Adya 2018's runs on CIFAR-100, and another filter for images of other sizes."""
SHAMPOO = {"name": "shampoo", "shampoo": {"every_steps": 4, "block": 32}}
BATCH_NORM = {"start": 1.5, "batch_norm_momentum": 0.6}
SHARDED = {"algorithm": "torus2d", "row": 4, "bucket_mb": 0.1, "shard_over": "world"}


def continued(config: RunConfig, step: int, run: str) -> RunConfig:
    """Return a run with nothing but the other's checkpoint of `step`."""
    other = config.model_copy(update={"run": config.run.model_copy(update={"id": run})})
    source = RunDirectory.for_config(config).checkpoints / f"step-{step}"
    shutil.copytree(source, RunDirectory.for_config(other).checkpoints / source.name)
    return other


def alike(result: dict[int, float], expected: dict[int, float], tolerance: float) -> None:
    assert list(result) == list(expected)
    np.testing.assert_allclose(list(result.values()), list(expected.values()), rtol=tolerance)


def close(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert result.keys() == expected.keys()
    for name, array in expected.items():
        scale = float(np.abs(array).max())
        np.testing.assert_allclose(result[name], array, rtol=tolerance, atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"train__optimizer": {"name": "lamb"}, **CIFAR},
        {"train__optimizer": LARS, "train__accumulation": 2, "train__phases": [BATCH_NORM]},
        {"train__optimizer": {"name": "nlcg"}},
        {"train__optimizer": {"name": "neumann", "neumann": {"sgd_epochs": 0.5, "reset_epochs": 1.0}}},
        {"train__optimizer": SHAMPOO},
    ],
    ids=[
        "lamb, pre-activation, CIFAR's input",
        "lars, two passes a step, batch norm's momentum",
        "nlcg",
        "neumann",
        "shampoo",
    ],
)
def test_either_engine_resumes_a_run_of_the_other(tmp_path: Path, options: dict[str, Any]) -> None:
    """With weights, moments, their count, running statistics, and position in schedule and sample order; both ways."""
    shards = make_shard_set(tmp_path / "shards")
    span = 16 // options.get("train__accumulation", 1)
    config = document(tmp_path, "torch", checkpoint__every_steps=3, model__batch_norm={"span": span}, **options)
    train_in_torch(config, shards)

    to_jax = continued(config, 6, "jax")
    result = train_in_jax(to_jax, shards, devices=1)
    expected = losses_of(config)
    alike(losses_of(to_jax), {step: expected[step] for step in range(7, 13)}, 2e-4)
    close(state_after(to_jax, 9), state_after(config, 9), 2e-3)
    assert result.steps == 12

    back = continued(to_jax, 9, "back")
    train_in_torch(back, shards)
    alike(losses_of(back), {step: expected[step] for step in range(10, 13)}, 2e-4)
    close(state_after(back, 12), state_after(to_jax, 12), 2e-3)
    evaluations = [[line["loss"] for line in lines_of(run, "evaluation")][-1] for run in (config, to_jax, back)]
    np.testing.assert_allclose(evaluations, evaluations[0], rtol=1e-3)


def stop_before(step: int) -> Callable[[JaxTrainer], None]:
    """Request a stop before the call that begins with step `step`, from 0."""

    def prepare(session: JaxTrainer) -> None:
        count = session.next_step_count

        def asked() -> int:
            if session.progress.step >= step:
                session.stop_request.requested = True
            return count()

        session.next_step_count = asked  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize(
    "changes",
    [
        {"train__optimizer": LARS, "train__weight_update": "sharded", "train__all_reduce": SHARDED},
        pytest.param({"train__optimizer": SHAMPOO, "train__phases": [BATCH_NORM]}, marks=pytest.mark.slow),
    ],
    ids=["lars, sharded over all devices", "shampoo"],
)
def test_a_stopped_run_resumes_to_the_bit_and_on_other_devices(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Eight devices with sharded weights, or with shared roots, and up to four steps a call."""
    shards = make_shard_set(tmp_path / "shards")
    settings: dict[str, Any] = {
        **CIFAR,
        **changes,
        "train__engine": "jax",
        "train__steps_per_call": 4,
        "telemetry__log_every": 100,
        "checkpoint__every_steps": 5,
    }
    whole, stopped = (document(tmp_path, name, **settings) for name in ("whole", "stopped"))
    train_in_jax(whole, shards, 8)
    with refused("step 6 of 12", kind=Preempted):
        train_in_jax(stopped, shards, 8, stop_before(3))
    kept = "train__optimizer", "train__phases"
    elsewhere = continued(stopped, 6, "elsewhere").model_copy(
        update={"train": document(tmp_path, **{k: v for k, v in changes.items() if k in kept}).train}
    )
    result = train_in_jax(stopped, shards, 8)
    assert result.steps == 12
    expected, resumed = state_after(whole, 12), state_after(stopped, 12)
    assert expected.keys() == resumed.keys()
    assert [name for name in expected if not np.array_equal(expected[name], resumed[name])] == []
    assert [line["step"] for line in lines_of(stopped, "evaluation")] == [3, 6, 9, 12]
    assert {line["event"] for line in lines_of(stopped, "event")} >= {"start", "resumed", "checkpoint", "done"}

    train_in_jax(elsewhere, shards, 2)
    close(state_after(elsewhere, 12), expected, 2e-3)


def test_several_steps_a_call_give_the_same_training(tmp_path: Path) -> None:
    """Calls end at the next due action, and one program serves every number of steps."""
    shards = make_shard_set(tmp_path / "shards")
    lengths: list[int] = []

    def watch(session: JaxTrainer) -> None:
        count = session.next_step_count

        def counted() -> int:
            lengths.append(count())
            return lengths[-1]

        session.next_step_count = counted  # type: ignore[method-assign]
        watched.append(session)

    watched: list[JaxTrainer] = []
    settings: dict[str, Any] = {"train__epochs": 5, "telemetry__log_every": 7, "evaluate__every_epochs": 2}
    one = document(tmp_path, "one", **settings)
    four = document(
        tmp_path,
        "four",
        **settings,
        train__engine="jax",
        train__steps_per_call=4,
        checkpoint={"every_steps": 5, "every_epochs": 0},
    )
    train_in_jax(one, shards, 2)
    train_in_jax(four, shards, 2, watch)
    assert lengths[:-1] == [4, 1, 1, 1, 3, 2, 2, 1]  # due: 5 a checkpoint, 6 an evaluation, 7 a line, 10, 12, 14, 15
    assert watched[0].step.run_steps._cache_size() == 1  # type: ignore[attr-defined]
    assert lines_of(four, "step")[0]["step"] == 7
    alike(losses_of(four), losses_of(one), 1e-4)
    close(state_after(four, 15), state_after(one, 15), 2e-3)


def test_too_many_non_finite_steps_fail_the_run(tmp_path: Path) -> None:
    shards = make_shard_set(tmp_path / "shards")
    config = document(tmp_path, train__max_nonfinite=2)

    def poison(session: JaxTrainer) -> None:
        begin = session.step.init_state

        def begun(parameters: Any, *rest: Any) -> Any:
            return begin({**parameters, "fc.bias": np.full(4, np.inf, np.float32)}, *rest)

        object.__setattr__(session.step, "init_state", begun)

    with refused("3 steps", "step 3)", NONFINITE_MESSAGE, field="train.max_nonfinite", kind=PodscaleError):
        train_in_jax(config, shards, 2, poison)
    assert [line["step"] for line in lines_of(config, "event") if line["event"] == "skipped_update"] == [1, 2, 3]


SHORT = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.00G of "
    "15.75G hbm. Exceeded hbm capacity by 4.25G."
)
"""Error text of the TPU compiler."""


def failing(program: str, message: str) -> Callable[[JaxTrainer], None]:
    """Let the compilation of the steps or of the evaluation fail."""

    def fail(*arguments: Any) -> Any:
        raise jax.errors.JaxRuntimeError(message)

    def prepare(session: JaxTrainer) -> None:
        if program == "training":
            object.__setattr__(session.step, "run_steps", fail)
        else:
            session.evaluator._eval_step = fail

    return prepare


@pytest.mark.parametrize(
    ("program", "span", "advice"),
    [
        (
            "training",
            4,
            "Lower train.global_batch, now 16, to about 8, or raise train.accumulation, now 1: `podscale tpu",
        ),
        ("training", 16, "Lower train.global_batch, or raise train.accumulation, now 1: `podscale tpu compile RUN"),
        ("evaluation", 16, "Lower evaluate.batch"),
    ],
)
def test_a_program_that_does_not_fit_the_memory_is_an_input_error(
    tmp_path: Path, program: str, span: int, advice: str
) -> None:
    """The error has the excess and a batch that fits: 12 images by proportion, 8 in parts of 4 on two devices."""
    shards, config = make_shard_set(tmp_path / "shards"), document(tmp_path, model__batch_norm__span=span)
    field = "evaluate.batch" if program == "evaluation" else "train.global_batch"
    with refused("20.0 GiB", "15.8 GiB", "4.2 GiB", field=field) as refusal:
        train_in_jax(config, shards, 2, failing(program, SHORT))
    assert refusal.error.hint.startswith(advice)


def test_another_error_of_the_compiler_is_raised_unchanged(tmp_path: Path) -> None:
    shards = make_shard_set(tmp_path / "shards")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: Mosaic failed"):
        train_in_jax(document(tmp_path), shards, 2, failing("training", "INTERNAL: Mosaic failed"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    shards = make_shard_set(tmp_path / "shards")
    config = document(tmp_path, "first", train__epochs=2)
    train_in_jax(config, shards, 1)
    other = continued(config, 3, "other")
    wider = other.model_copy(update={"model": other.model.model_copy(update={"name": "resnet34"})})
    with refused("model.name", "'resnet18'", "'resnet34'"):
        train_in_jax(wider, shards, 1)


def test_programs_are_cached_and_damaged_ones_recompiled(tmp_path: Path) -> None:
    from jax._src import monitoring
    from jax.experimental.compilation_cache import compilation_cache

    from podscale.jax import program_cache

    shards = make_shard_set(tmp_path / "shards")
    hits: list[str] = []
    monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)

    before = jax.config.jax_compilation_cache_dir
    try:
        results, counts = [], []
        for number in range(3):
            jax.clear_caches()
            compilation_cache.reset_cache()
            if number == 1:  # cached programs must not depend on their path
                shutil.copytree(tmp_path / "programs", tmp_path / "moved")
            with mock.patch.object(program_cache, "MIN_COMPILE_SECONDS", 0.0):  # these programs compile quickly
                directory = program_cache.enable_program_cache(tmp_path / ("programs" if number == 0 else "moved"))
            hits.clear()
            results.append(train_in_jax(document(tmp_path, f"run{number}", train__epochs=2), shards, 2))
            counts.append(len(hits))
            kept = [path for path in directory.iterdir() if path.name.endswith("-cache")]
            assert kept
            if number == 1:
                for path in kept:
                    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        assert counts[0] == 0
        assert counts[1] >= 2, counts
        assert counts[2] == 0
        assert results[0] == results[1] == results[2]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
