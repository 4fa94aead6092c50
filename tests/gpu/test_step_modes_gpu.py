"""Every mode of a step on a CUDA device gives the same result, and the host never waits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

ALEXNET = {"name": "alexnet", "width": 8}


def different(left: dict[str, Any], right: dict[str, Any], tolerance: float = 0.0) -> list[str]:
    """Return the names of the arrays that differ by more than `tolerance` times their largest value."""
    import torch

    assert left.keys() == right.keys()
    if tolerance == 0.0:
        return [name for name in left if not torch.equal(left[name], right[name])]
    far = {name: (left[name].double() - right[name].double()).abs().max().item() for name in left}
    return [name for name, error in far.items() if error > tolerance * (right[name].abs().max().item() + 1e-3)]


@pytest.fixture
def no_autotuning(monkeypatch: Any) -> Iterator[None]:
    import torch

    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"all_reduce": {"algorithm": "torus2d", "bucket_mb": 0.1}},
        {"optimizer": {"name": "lars"}, "accumulation": 2},
        {"weight_update": "sharded"},
    ],
    ids=["sgd", "torus2d", "lars, accumulated", "sharded"],
)
def test_a_replayed_graph_gives_the_bits_of_eager_steps(
    make_shard_set: Any, document: Any, train_here: Any, tmp_path: Path, options: Any, precision: str
) -> None:
    """12 steps, 3 of them warm-up and the rest replays, equal 12 eager ones."""
    shards = make_shard_set()
    states = []
    for graph in (False, True):
        config = document(tmp_path / str(graph), cuda_graph=graph, precision=precision, **options)
        states.append(train_here(config, shards))
    assert different(*states) == []


def test_dropout_draws_new_masks_in_every_replay(
    make_shard_set: Any, document: Any, train_here: Any, tmp_path: Path
) -> None:
    shards = make_shard_set()
    states = []
    for graph in (False, True):
        config = document(
            tmp_path / str(graph), model=ALEXNET, size=224, cuda_graph=graph, schedule={"learning_rate": 0.001}
        )
        states.append(train_here(config, shards))
    assert different(*states) == []


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "fp16"}, {"precision": "bf16-pure", "weight_update": "sharded"}],
    ids=["fp32", "fp16", "bf16-pure, sharded"],
)
def test_the_running_average_follows_replayed_steps(
    make_shard_set: Any, document: Any, train_here: Any, tmp_path: Path, options: Any
) -> None:
    """It has the bits of eager steps, and follows the recursion of the weights after every second replay."""
    import torch

    shards, ema = make_shard_set(), {"decay": 0.8, "every_steps": 2}
    states: list[dict[str, Any]] = []
    trained: dict[int, dict[str, Any]] = {}

    def weights(state: dict[str, Any]) -> dict[str, Any]:
        chosen = {name.removeprefix("model/"): value for name, value in state.items() if name.startswith("model/")}
        return {name: value.double().cpu() for name, value in chosen.items()}

    def watch(trainer: Any, step: int) -> None:
        trained[step] = weights(trainer.state.tensors())

    for graph in (False, True):
        config = document(tmp_path / str(graph), cuda_graph=graph, ema=ema, **options)
        states.append(train_here(config, shards, watch))
    assert different(*states) == []
    trained[12] = weights(states[1])
    average = trained[0]
    for step in range(2, 13, 2):
        average = {name: 0.8 * value + 0.2 * trained[step][name] for name, value in average.items()}
    for name, value in average.items():
        averaged = states[1][f"ema/{name}"].double()
        torch.testing.assert_close(averaged, value, rtol=2e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert (states[1]["ema/fc.weight"] - states[1]["model/fc.weight"]).abs().max() > 1e-3


def test_sampled_steps_report_times_and_do_not_change_the_result(
    make_shard_set: Any, document: Any, train_here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, samples = make_shard_set(), []

    def watch(trainer: Any, step: int) -> None:
        if step == 0:
            trainer.step._on_sampled = samples.append

    with monkeypatch.context() as patch:
        patch.setattr("podscale.pytorch.cuda_graph.SAMPLE_EVERY_STEPS", 2)
        sampled = train_here(document(tmp_path / "sampled", cuda_graph=True), shards, watch)
    plain = train_here(document(tmp_path / "plain", cuda_graph=True), shards)
    assert different(sampled, plain) == []
    assert len(samples) >= 4
    for times in samples:
        assert set(times) == {"forward_backward", "allreduce_wait", "optimizer"}
        assert all(0 <= seconds < 10 for seconds in times.values())
        assert times["forward_backward"] > 0


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize(("precision", "mix"), [("bf16", {}), ("fp16", {}), ("bf16", {"mixup": 0.2, "cutmix": 1.0})])
def test_the_host_never_waits_between_steps(
    make_shard_set: Any,
    document: Any,
    train_here: Any,
    tmp_path: Path,
    precision: str,
    mix: dict[str, float],
    cuda_graph: bool,
) -> None:
    """From step 5 to the last but one, every call that makes the host wait for the device is an error."""
    import torch

    seen = []

    def watch(trainer: Any, step: int) -> None:
        seen.append(step)
        if step in (5, 11):
            torch.cuda.set_sync_debug_mode("error" if step == 5 else "default")

    config = document(tmp_path, precision=precision, cuda_graph=cuda_graph, optimizer={"name": "lars"}, mix=mix)
    config = config.model_copy(
        update={
            "checkpoint": config.checkpoint.model_copy(update={"every_epochs": 0.0}),
            "evaluate": config.evaluate.model_copy(update={"every_epochs": 0.0}),
        }
    )
    try:
        train_here(config, make_shard_set(), watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen == list(range(12))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.usefixtures("no_autotuning")
def test_compiled_steps_equal_eager_ones(
    make_shard_set: Any, document: Any, train_here: Any, tmp_path: Path, mode: str, cuda_graph: bool
) -> None:
    if mode == "reduce-overhead" and cuda_graph:
        pytest.skip("records its own graphs (refused by the document's checks)")
    shards = make_shard_set()
    options = {"deterministic": False, "schedule": {"learning_rate": 0.01}, "epochs": 2}
    plain = train_here(document(tmp_path / "plain", **options), shards)
    compiled = train_here(document(tmp_path / "compiled", compile=mode, cuda_graph=cuda_graph, **options), shards)
    weights = [{n: t for n, t in state.items() if n.startswith("model/")} for state in (compiled, plain)]
    assert different(*weights, tolerance=0.02) == []


def test_inception_trains_with_deterministic_kernels(
    make_shard_set: Any, document: Any, train_here: Any, tmp_path: Path
) -> None:
    """Backward of its average pooling must not be an operator that torch refuses; two runs give the same bits."""
    shards = make_shard_set()
    model = {"name": "inception_resnet_v2"}
    states = []
    for name in ("first", "second"):
        config = document(tmp_path / name, model=model, size=139, epochs=1, schedule={"learning_rate": 0.001})
        states.append(train_here(config, shards))
    assert different(*states) == []


@pytest.mark.parametrize("compute", ["padded4", "space_to_depth"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_way_equals_the_plain_stem(world: Any, compute: str, precision: str) -> None:
    import torch

    from podscale.pytorch.models import Stem

    torch.manual_seed(0)
    plain = Stem(64, 7, 2, 3).to(world.device, memory_format=torch.channels_last)
    other = Stem(64, 7, 2, 3).to(world.device, memory_format=torch.channels_last)
    other.load_state_dict(plain.state_dict())
    other.compute = compute  # type: ignore[assignment]
    images = torch.randn(8, 3, 224, 224, device=world.device).to(memory_format=torch.channels_last)
    direction = torch.randn(8, 64, 112, 112, device=world.device)
    outputs = []
    for stem in (plain, other):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            y = stem(images)
        assert y.is_contiguous(memory_format=torch.channels_last)
        (y.float() * direction).sum().backward()
        outputs.append(y.float())
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    torch.testing.assert_close(outputs[1], outputs[0], rtol=tolerance, atol=tolerance)
    assert plain.weight.grad is not None
    assert other.weight.grad is not None
    scale = plain.weight.grad.abs().max()
    torch.testing.assert_close(other.weight.grad / scale, plain.weight.grad / scale, rtol=0, atol=tolerance)


def test_another_shape_is_recorded_again(world: Any) -> None:
    import numpy as np
    import torch

    from podscale.data.loaders.base import Batch
    from podscale.pytorch.cuda_graph import CudaGraphStep
    from podscale.pytorch.device_prefetcher import DeviceBatch

    class Nothing:
        def start_step(self, step: int) -> None: ...

        def run_on_device(self, batch: Any, phase: Any) -> Any:
            from podscale.pytorch.train_step import StepResult

            return StepResult(batch.images.float().sum(), batch.labels.sum() > 0)

    def batch(length: int, step: int) -> DeviceBatch:
        images = torch.full((length, 4, 4, 3), step, dtype=torch.uint8, device=world.device)
        labels = torch.full((length,), step, device=world.device)
        keys = np.zeros(length, np.uint64)
        return DeviceBatch(images, labels, Batch(None, keys.astype(np.int64), keys, np.ones(length, np.float32), step))

    from contextlib import nullcontext

    graphed = CudaGraphStep(Nothing(), world, on_sampled=lambda seconds: None)  # type: ignore[arg-type]
    results = [graphed(batch(2, step), lambda name: nullcontext()) for step in range(8)]
    assert [result.loss.item() for result in results] == [96 * step for step in range(8)]
    assert [bool(result.finite) for result in results] == [step > 0 for step in range(8)]
    assert graphed(batch(3, 8), lambda name: nullcontext()).loss.item() == 144 * 8
    for _ in range(2):  # closing twice is no error, and the next call records again
        graphed.close()
    assert graphed(batch(2, 9), lambda name: nullcontext()).loss.item() == 96 * 9
    graphed.close()


def test_the_benchmark_measures_a_graph(tmp_path: Path) -> None:
    """In its own processes, as in `podscale bench train`."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from podscale.bench.sweep import SweepSettings, run_sweep
    from podscale.bench.variants import BenchVariant
    from podscale.config import RunConfig, load

    def base(more: list[str]) -> RunConfig:
        return load(None, ["model.name=resnet18", "model.width=16", "input.image_size=64", *more])

    variant = BenchVariant(
        "graph", {"train.cuda_graph": True, "train.precision": "bf16", "launch.processes": 1}, batch=16
    )
    settings = SweepSettings(warmup=8, steps=10, parts=3)
    (row,) = run_sweep(base, [variant], settings, tmp_path / "rows.json", lambda row, rows: None)
    assert row.found is not None, row.reason
    assert row.found["images_per_second"] > 0
    assert set(row.found["part_seconds"]) == {"forward", "backward", "allreduce_wait", "optimizer"}
