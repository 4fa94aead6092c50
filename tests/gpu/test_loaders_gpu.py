"""Loaders that decode on a GPU read the samples and crops of the reference, with pixels near its decoder's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.config.run_config import RunConfig
from podscale.data.loaders.build_loader import build_evaluation_loader, build_loader, is_dali_installed
from podscale.data.sampler import build_sampler, evaluation_steps
from podscale.data.shard_set import ShardSet
from podscale.training.schedules import image_phases
from tests.support.loading import NATIVE, document, open_loader
from tests.support.shard_set import Sample, encode_image, image_size, smooth_pixels, varied_samples

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"


@pytest.fixture(params=["dali", "nvjpeg"])
def loader(request: pytest.FixtureRequest) -> str:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "dali" and not is_dali_installed():
        pytest.skip("DALI is not installed")
    if request.param == "nvjpeg":
        from podscale.data.loaders.nvjpeg import is_available_on

        if not is_available_on(DEVICE):
            pytest.skip("this torchvision does not decode on a GPU")
    return str(request.param)


def run(loader: str, directory: Path, device: str, *, training: bool, **section: Any) -> list[Any]:
    """Return all batches; `section` has further options of the input section."""
    config = RunConfig.model_validate(
        {
            "input": {"loader": loader, "image_size": 64, "workers": 2, "max_bad_rate": 0.5, **section},
            "train": {"global_batch": 16},
            "evaluate": {"batch": 16},
        }
    )
    split = ShardSet.open(directory).split("train")
    if training:
        batch_loader = build_loader(
            config,
            split,
            build_sampler(config, split),
            phases=image_phases(config, len(split)),
            ranks=range(1),
            world_size=1,
            device=device,
        )
        stop = 6
    else:
        batch_loader = build_evaluation_loader(config, split, ranks=range(1), world_size=1, device=device)
        stop = evaluation_steps(len(split), 1, 16)
    try:
        return list(batch_loader.batches(0, stop))
    finally:
        batch_loader.close()


@pytest.mark.parametrize("training", [True, False])
def test_batches_match_the_reference_while_the_gpu_is_busy(loader: str, make_shard_set: Any, training: bool) -> None:
    """Work in the current stream stands for a step: a loader must neither wait for it nor overwrite its memory."""
    import torch

    directory = make_shard_set({"train": varied_samples(40, 4), "validation": varied_samples(8, 4)})
    reference = run("reference", directory, "cpu", training=training)
    busy = torch.randn(8192, 8192, device=DEVICE)
    for _ in range(50):
        busy = busy @ busy / 100
    batches = run(loader, directory, DEVICE, training=training)
    for left, right in zip(reference, batches, strict=True):
        assert np.array_equal(left.keys, right.keys)
        assert np.array_equal(left.labels, right.labels)
        assert str(right.images.device) == DEVICE
        assert right.images.shape == left.images.shape
        difference = np.abs(left.images.astype(int) - right.images.cpu().numpy())
        assert difference.mean() < 3  # 2.3 by nvJPEG of CUDA 13 on an H200, whose colours are interpolated otherwise


@pytest.mark.parametrize("training", [True, False])
def test_bicubic_pixels_match_the_reference(loader: str, make_shard_set: Any, training: bool) -> None:
    """The reference's bilinear pixels of the same noise are farther away."""
    samples = []
    for number in range(40):
        noise = np.random.default_rng(number).integers(60, 196, (150, 150, 3)).astype(np.uint8)
        samples.append(Sample(encode_image(noise, quality=95, subsampling=0), number % 4))
    directory = make_shard_set({"train": samples, "validation": samples[:8]})
    bicubic, bilinear = (
        run("reference", directory, "cpu", training=training, interpolation=name) for name in ("bicubic", "bilinear")
    )
    batches = run(loader, directory, DEVICE, training=training, interpolation="bicubic")
    for want, other, batch in zip(bicubic, bilinear, batches, strict=True):
        pixels = batch.images.cpu().numpy().astype(int)
        inside = (slice(None), slice(4, -4), slice(4, -4))  # DALI repeats the pixels at the border
        near, far = (np.abs(pixels - images.images)[inside].mean() for images in (want, other))
        assert near < 1
        assert near < far / 2


def test_padded_crops_match_the_reference(loader: str, make_shard_set: Any) -> None:
    """Images of the training size are not resized; black where the crop leaves the image."""
    samples = [
        Sample(encode_image(smooth_pixels(number, 64, 64), quality=95, subsampling=0), number % 4)
        for number in range(40)
    ]
    directory = make_shard_set({"train": samples, "validation": samples[:8]})
    reference, batches = (
        run(name, directory, device, training=True, crop={"padding": 8})
        for name, device in (("reference", "cpu"), (loader, DEVICE))
    )
    for left, right in zip(reference, batches, strict=True):
        difference = np.abs(left.images.astype(int) - right.images.cpu().numpy())
        assert difference.mean() < 2
        assert np.quantile(difference, 0.999) <= 6


def test_a_bad_record_is_replaced_on_the_gpu_too(loader: str, make_shard_set: Any) -> None:
    samples = [*varied_samples(40, 4)]
    samples[7] = Sample(b"\0" * 200, samples[7].label, image_size(samples[7].image))
    directory = make_shard_set({"train": samples, "validation": varied_samples(8, 4)})
    reference = run("reference", directory, "cpu", training=True)
    batches = run(loader, directory, DEVICE, training=True)
    for left, right in zip(reference, batches, strict=True):
        assert np.array_equal(left.keys, right.keys)


@pytest.mark.parametrize("name", ["reference", NATIVE])
def test_loaders_on_the_cpu_fill_pinned_memory_that_is_reused_after_its_copy(make_shard_set: Any, name: str) -> None:
    """Work in the prefetcher's stream delays the copies: memory that was reused too early would change the batches."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from podscale.pytorch.device_prefetcher import DevicePrefetcher
    from podscale.pytorch.world import World
    from podscale.training.step_timer import untimed

    steps = 40
    split = ShardSet.open(make_shard_set({"train": varied_samples(40, 4), "validation": []})).split("train")
    config = document(name, batch=16, size=64)
    with open_loader(config, split) as loader:
        wanted = [batch.images.copy() for batch in loader.batches(0, steps)]
    prefetcher = DevicePrefetcher(World(0, 1, 0, 1, torch.device(DEVICE)))
    addresses, copies = set(), []
    with open_loader(config, split, device=DEVICE) as loader:
        batches = prefetcher(loader.batches(0, steps), untimed)
        for number in range(steps):
            with torch.cuda.stream(prefetcher._stream):
                torch.cuda._sleep(10_000_000)  # cycles, some milliseconds
            item = next(batches)
            images = torch.from_numpy(item.host_batch.images)
            assert images.is_pinned()
            assert images.pin_memory().data_ptr() == images.data_ptr(), "there is no second copy on the host"
            addresses.add(images.data_ptr())
            copies.append(item.images)
            del item, images
            if number % 10 == 9:
                torch.cuda.synchronize()
    assert len(addresses) < steps, "memory is reused"
    for images, other in zip(copies, wanted, strict=True):
        np.testing.assert_array_equal(images.cpu().numpy(), other)


def test_the_input_benchmark_has_the_batches_on_the_gpu(make_shard_set: Any) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from podscale.bench.input_rates import InputRow, InputSettings, measure_loaders
    from podscale.config import InputSection
    from podscale.pytorch.device_prefetcher import deliver_batches
    from podscale.pytorch.gpu_checks import check_device

    check_device(DEVICE)
    split = ShardSet.open(make_shard_set()).split("train")
    rows = [InputRow("reference", 2), InputRow("nvjpeg", None)]
    settings = InputSettings(16, 0.2, rounds=2, device=DEVICE)
    before = torch.cuda.max_memory_allocated()
    measured = measure_loaders(
        InputSection(image_size=64), split, rows, settings, deliver=lambda batches: deliver_batches(batches, DEVICE)
    )
    assert measured[0].per_second > 0
    assert torch.cuda.max_memory_allocated() >= before + 16 * 64 * 64 * 3


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_kernels_crop_a_batch_with_the_pixels_of_pil(interpolation: Any) -> None:
    """On a GPU a fused multiply-add may move a weight, and so a pixel, by one."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from podscale.data.loaders.nvjpeg import has_crop_kernels
    from tests.support.crop_kernel_oracle import differences

    assert has_crop_kernels(DEVICE)
    assert max(differences(interpolation, DEVICE).values()) <= 1
