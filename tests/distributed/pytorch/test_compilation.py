"""torch.compile around the network: the same steps as without it, with gradients in the reducer's buffer."""

import copy
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from podscale.config import InputSection, ModelSection
from podscale.models.resnet import BASIC, ResNetSpec
from podscale.pytorch.all_reduce import FlatAllReduce
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.batch_norm.layer import RunningStatistics
from podscale.pytorch.device_prefetcher import Normalise
from podscale.pytorch.models import ResNet, Stem, build_model
from podscale.pytorch.models.subsampled_conv import subsample_convs
from podscale.pytorch.reducer import BucketedReducer
from podscale.pytorch.train_step import build_forward
from podscale.pytorch.world import World, join_world, leave_world


def norm(channels: int) -> nn.Module:
    return BatchNorm(channels)


def resnet() -> nn.Module:
    return subsample_convs(ResNet(ResNetSpec(BASIC, (1, 1, 1, 1), 4, True, "projection", False), 5, norm))


def small() -> nn.Module:
    return nn.Sequential(Stem(4, 3, 2, 1), BatchNorm(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5))


@pytest.fixture
def world() -> Any:
    yield join_world(60.0, {})
    leave_world()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    yield
    torch._dynamo.reset()


def train_steps(
    network: Callable[[], nn.Module], world: World, side: int, *, mode: Any, backend: Any, ranks: int
) -> tuple[list[float], nn.Module]:
    """Run three gradient steps on uint8 images through the reducer. Returns the losses, and the network after them."""
    torch.manual_seed(3)
    model = network().to(memory_format=torch.channels_last).train()
    statistics = RunningStatistics(model)
    reducer = BucketedReducer(model, FlatAllReduce(world), world, bucket_mb=0.01)
    normalise = Normalise(InputSection(), world, channels_last=True)
    forward = build_forward(normalise, reducer.module, mode, ranks=ranks, backend=backend)
    generator, losses = np.random.default_rng(0), []
    for _ in range(3):
        images = torch.from_numpy(generator.integers(0, 256, (4, side, side, 3), dtype=np.uint8))
        reducer.start_step()
        statistics.save()
        loss = nn.functional.cross_entropy(forward(images), torch.arange(4))
        reducer.backward(loss, last=True)
        reducer.finish()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), reducer.buffer.views, strict=True):
                parameter -= 0.05 * gradient
    reducer.close()
    return losses, copy.deepcopy(model)


def assert_alike(found: tuple[list[float], nn.Module], want: tuple[list[float], nn.Module]) -> None:
    assert found[0] == pytest.approx(want[0], rel=1e-4)
    for (name, tensor), other in zip(found[1].state_dict().items(), want[1].state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, other, rtol=2e-3, atol=2e-4, msg=name)
    assert found[0][0] != found[0][2]


def test_one_rank_compiles_one_graph_and_several_one_for_each_region(world: World) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # not at the top: it takes seconds

    plain = train_steps(resnet, world, 16, mode="off", backend="inductor", ranks=1)
    for ranks, graphs, backend in ((1, 1, "eager"), (4, 6, "aot_eager")):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = train_steps(resnet, world, 16, mode="default", backend=counter, ranks=ranks)
        assert counter.frame_count == graphs
        assert_alike(compiled, plain)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++ on a CPU")
def test_the_real_compiler(world: World, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)  # slower than these few kernels
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)  # the check compiles a program
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # a pool of processes would import torch first
    plain = train_steps(small, world, 16, mode="off", backend="inductor", ranks=1)
    compiled = train_steps(small, world, 16, mode="default", backend="inductor", ranks=1)
    assert_alike(compiled, plain)


@pytest.mark.parametrize("name", ["resnet18", "alexnet"])
def test_off_is_the_network_itself(name: str, world: World) -> None:
    model = build_model(ModelSection(name=name, width=4), 5).eval()  # type: ignore[arg-type]
    images = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    normalise = Normalise(InputSection(), world, channels_last=True)
    for ranks in (1, 2):
        forward = build_forward(normalise, model, "off", ranks=ranks)
        with torch.no_grad():
            assert torch.equal(forward(images), model(normalise(images)))
