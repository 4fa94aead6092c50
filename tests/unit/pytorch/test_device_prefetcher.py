"""Batches on the device: order, normalisation, mixup and cutmix."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from podscale.config import InputSection, loads
from podscale.config.train import MixSection
from podscale.data.loaders.base import Batch
from podscale.data.rng import derive_key
from podscale.pytorch.device_prefetcher import BatchMixer, DevicePrefetcher, Normalise, sample_beta
from podscale.pytorch.train_step import TrainingLoss
from podscale.pytorch.world import World
from tests.support.refusals import refused
from tests.support.standardisation import compare_standardised, standardisation_cases

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def batch(step: int) -> Batch:
    images = np.random.default_rng(step).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    return Batch(images, np.arange(4), np.arange(4, dtype=np.uint64), np.ones(4, np.float32), step)


@pytest.mark.parametrize("channels_last", [True, False])
def test_batches_keep_their_order_and_are_normalised(channels_last: bool) -> None:
    section = InputSection(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    phases: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append(name)
        yield

    normalise = Normalise(section, ALONE, channels_last=channels_last)
    found = list(DevicePrefetcher(ALONE)(iter([batch(7), batch(8)]), phase))
    assert [item.host_batch.step for item in found] == [7, 8]
    for item in found:
        want = (item.host_batch.images / 255.0 - section.mean) / section.std
        images = normalise(item.images)
        np.testing.assert_allclose(images.permute(0, 2, 3, 1).numpy(), want, atol=1e-6)
        assert images.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        assert images.dtype == torch.float32
        assert item.images.dtype == torch.uint8
    assert phases == ["data_wait", "h2d", "data_wait", "h2d", "data_wait"]


@pytest.mark.parametrize("channels_last", [True, False])
def test_standardised_images_have_their_own_mean_and_deviation(channels_last: bool) -> None:
    """As tf.image.per_image_standardization, in float64; N counts all channels, and a constant image becomes 0."""
    images = standardisation_cases()
    section = InputSection(per_image_standardization=True)
    normalise = Normalise(section, ALONE, channels_last=channels_last)
    found = normalise(torch.from_numpy(images))
    compare_standardised(found.permute(0, 2, 3, 1).numpy(), images)
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(normalise(torch.from_numpy(images[1:2])).numpy(), found[1:2].numpy())


def test_constants_of_the_data_set_do_not_go_with_standardisation() -> None:
    on = "per_image_standardization: true"
    for name in ("mean", "std"):
        with refused("input.per_image_standardization", field=f"input.{name}"):
            loads(f"input: {{{on}, {name}: [0.3, 0.3, 0.3]}}")
    loads(f"input: {{{on}, mean: [0.3, 0.3, 0.3], augment: {{erase: 0.1}}}}")  # the colour of erased rectangles


def test_tensors_of_the_loader_are_not_changed() -> None:
    source = batch(0)
    images = torch.from_numpy(source.images)
    before = images.clone()
    given = Batch(images, source.labels, source.keys, source.weights, 0)
    section = InputSection()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        yield

    (found,) = DevicePrefetcher(ALONE)(iter([given]), phase)
    assert Normalise(section, ALONE, channels_last=True)(found.images).shape == (4, 3, 5, 6)
    assert torch.equal(images, before)


def mixing(seed: int = 5, rank: int = 0, **section: float) -> BatchMixer:
    return BatchMixer(MixSection(**section), seed, World(rank, 2, 0, 2, torch.device("cpu")))


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_draws_have_the_moments_of_the_beta_distribution(alpha: float) -> None:
    """Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1))."""
    draws = np.array([sample_beta(alpha, derive_key(1, number)) for number in range(4000)])
    assert ((draws >= 0) & (draws <= 1)).all()
    assert draws.mean() == pytest.approx(0.5, abs=0.03)
    assert draws.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.06)


def test_mixup_adds_an_image_and_its_counterpart() -> None:
    mix, images = mixing(mixup=1.0), torch.randn(5, 3, 8, 6)
    mix.start_step(3)
    share = float(mix.mix_weight(8, 6))
    assert 0 < share < 1
    want = share * images.numpy() + (1 - share) * images.numpy()[::-1]
    np.testing.assert_allclose(mix.mix_images(images).numpy(), want, rtol=1e-5, atol=1e-6)


def test_cutmix_replaces_a_rectangle_and_weighs_by_its_pixels() -> None:
    mix = mixing(cutmix=1.0)
    images = torch.arange(4.0)[:, None, None, None].expand(4, 3, 20, 30)
    areas = []
    for step in range(40):
        mix.start_step(step)
        mixed, share = mix.mix_images(images).numpy(), float(mix.mix_weight(20, 30))
        other = mixed[0, 0] == 3
        assert ((mixed[0, 0] == 0) | other).all()
        rows, columns = np.flatnonzero(other.any(1)), np.flatnonzero(other.any(0))
        assert other.sum() == len(rows) * len(columns), "the replaced pixels are a rectangle"
        assert share == pytest.approx(1 - other.mean(), abs=1e-6)
        np.testing.assert_array_equal(mixed[3, 0] == 0, other)
        areas.append(other.mean())
    assert min(areas) < 0.1
    assert max(areas) > 0.5


def test_draws_are_keyed_by_seed_step_and_rank() -> None:
    def drawn(step: int, **changes: int) -> list[float]:
        mix = mixing(mixup=0.2, cutmix=1.0, **changes)
        mix.start_step(step)
        return mix._draw.tolist()

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert drawn(7) != drawn(7, seed=6)
    assert drawn(7) != drawn(7, rank=1)
    ways = [drawn(step)[0] for step in range(60)]
    assert 15 < sum(ways) < 45, "mixup and cutmix are each drawn about half of the time"


LABELS = torch.tensor([0, 2, 1, 2])
SOFT = 0.7 * np.eye(3)[[0, 2, 1, 2]] + 0.3 * np.eye(3)[[2, 1, 2, 0]]


def test_mixed_targets_give_the_cross_entropy_of_soft_targets() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    found = TrainingLoss(0.1)(logits, LABELS, torch.tensor(0.7))
    smooth = torch.from_numpy(0.9 * SOFT + 0.1 / 3).float()
    torch.testing.assert_close(found, F.cross_entropy(logits, smooth))
    torch.testing.assert_close(TrainingLoss(0.1)(logits, LABELS), F.cross_entropy(logits, LABELS, label_smoothing=0.1))


@pytest.mark.parametrize(("threshold", "targets"), [(None, 0.9 * SOFT + 0.1 / 3), (0.2, SOFT > 0)])
def test_binary_cross_entropy_is_the_mean_over_classes(threshold: float | None, targets: np.ndarray) -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    chances = 1 / (1 + np.exp(-logits.double().numpy()))
    want = -(targets * np.log(chances) + (1 - targets) * np.log(1 - chances)).mean()
    found = TrainingLoss(0.1, is_binary=True, threshold=threshold)(logits, LABELS, torch.tensor(0.7))
    assert float(found) == pytest.approx(want, rel=1e-5)


def test_conflicting_options_are_refused() -> None:
    with refused("train.loss=binary_cross_entropy", field="train.binary_threshold", got=0.2):
        loads("train: {binary_threshold: 0.2}")
    with refused("train.engine=pytorch", field="train.mix"):
        loads("train: {engine: jax, mix: {mixup: 0.1}}")
