"""The run documents that come with Podscale are valid, documented and found by name."""

import difflib
import re
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from podscale.config import load
from podscale.config.engine_support import requests_tpus
from podscale.config.identity import result_values
from podscale.config.preflight import find_problems
from podscale.config.ranks import batch_norm_group, check_ranks
from podscale.data.step_positions import step_positions
from podscale.hardware import find_hardware, find_topology
from podscale.pipelines import presets
from podscale.pipelines.presets import (
    PRESET_DIRECTORY,
    preset_names,
    preset_summary,
    published_presets,
    resolve_preset,
)
from podscale.training import schedules
from tests.support.refusals import refused


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_valid_document_with_a_head(name):
    config = load(resolve_preset(name))
    assert config.run.id == name, "a preset's run is called as the preset"
    head = (PRESET_DIRECTORY / f"{name}.yaml").read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in head)
    shown = re.compile(rf"podscale (run|submit|render|compile) {name}\b")
    assert name == presets.DEFAULT_PRESET or any(map(shown.search, head)), "the head shows the command"
    assert 10 < len(preset_summary(name)) < 120


@pytest.mark.parametrize("name", preset_names())
def test_the_commands_of_a_head_make_valid_documents(name):
    head = (PRESET_DIRECTORY / f"{name}.yaml").read_text().split("\n\n")[0].replace("\\\n#", "")
    commands = re.findall(r"^#   podscale (.*)", head, re.MULTILINE)
    for command in commands:
        words = shlex.split(command, comments=True)
        load(resolve_preset(name), [change for flag, change in pairwise(words) if flag == "--set"])
    assert commands or name == presets.DEFAULT_PRESET


@pytest.mark.parametrize("name", preset_names())
def test_what_takes_several_machines_is_not_shown_as_a_run_of_one(name):
    """`podscale run` is for this machine, and refuses it."""
    head = (PRESET_DIRECTORY / f"{name}.yaml").read_text().split("\n\n")[0]
    assert load(resolve_preset(name)).launch.nodes == 1 or "podscale run" not in head


def test_presets_of_the_jax_engine_ask_for_tpus():
    """Without, their pods would train on CPUs, and say nothing of it."""
    of_jax = [name for name in preset_names() if load(resolve_preset(name)).train.engine == "jax"]
    assert len(of_jax) == 3
    for name in of_jax:
        assert requests_tpus(load(resolve_preset(name))), name


@pytest.mark.parametrize("name", preset_names())
def test_a_claim_names_its_source(name):
    claim = load(resolve_preset(name)).claim
    if claim != type(claim)():
        assert claim.source
        assert claim.hardware


def test_the_default_preset_runs_anywhere(tmp_path):
    config = load(resolve_preset(None), [f"run.workspace={tmp_path}"])
    assert config.data.source == "digits"
    assert config.launch.processes == 2
    assert find_problems(config, "here") == []


def test_names_and_paths(tmp_path, monkeypatch):
    assert resolve_preset(None) == resolve_preset("digits") == PRESET_DIRECTORY / "digits.yaml"
    (tmp_path / "mine.yaml").write_text("run: {id: mine}\n")
    assert resolve_preset(str(tmp_path / "mine.yaml")) == tmp_path / "mine.yaml"
    assert resolve_preset("not-there.yaml") == Path("not-there.yaml"), "load says that the file is missing"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").write_text("run: {id: own}\n")
    assert resolve_preset("digits") == Path("digits"), "a file of that name in this folder wins"
    with refused("imagenette", field="imagenete"):
        resolve_preset("imagenete")
    with refused("adya2018-65k, adya2018-cifar100-16k, akiba", field="zzz"):
        resolve_preset("zzz")


def test_presets_do_not_differ_by_accident():
    """A preset that is nearly another one is a --set, not a preset."""
    texts = {name: (PRESET_DIRECTORY / f"{name}.yaml").read_text() for name in preset_names()}
    for first in texts:
        for second in texts:
            if first < second:
                matcher = difflib.SequenceMatcher(None, texts[first], texts[second])
                assert matcher.quick_ratio() < 0.9 or matcher.ratio() < 0.9  # the quick one is an upper bound


OWN = (
    *("digits", "digits-ensemble", "imagefolder", "imagenette", "linear-probe", "fine-tune"),
    *("tpu-v5e-16", "tpu-v6e-64"),
)
PUBLISHED = published_presets()

# Written here a second time, from the sources that the heads of the presets name: global batch, ranks, optimizer,
# learning rate, warm-up epochs, momentum, weight decay, epochs, images behind one batch-norm statistic.
CITED: dict[str, tuple[int, int, str, float, float, float, float, float, int]] = {
    "ffcv-88epochs": (4096, 8, "sgd", 1.7, 2, 0.9, 1e-4, 88, 512),
    "goyal2017-8k": (8192, 256, "sgd", 3.2, 5, 0.9, 1e-4, 90, 32),
    "codreanu2017-448nodes": (14336, 896, "sgd", 4.8, 446 * 14336 / 1281167, 0.9, 5e-5, 8040 * 14336 / 1281167, 16),
    "codreanu2017-64nodes": (4096, 128, "sgd", 1.6, 1560 * 4096 / 1281167, 0.9, 5e-5, 22610 * 4096 / 1281167, 32),
    "codreanu2017-collapsed-ensemble": (
        4096,
        128,
        "sgd",
        1.6,
        1560 * 4096 / 1281167,
        0.9,
        5e-5,
        21050 * 4096 / 1281167,
        32,
    ),
    "codreanu2017-1536nodes": (24576, 1536, "sgd", 4.8 * 24576 / 14336, 5, 0.9, 5e-5, 90, 16),
    "akiba2017-32k": (32768, 1024, "lars", 29.0, 18, 0.929, 1e-4, 90, 32),
    "you2017-32k": (32768, 2048, "lars", 40, 12, 0.9, 5e-4, 90, 16),
    "ying2018-32k": (32768, 1024, "lars", 34, 12, 0.9, 1e-4, 90, 128),
    "ying2018-64k": (65536, 1024, "lars", 35, 34, 0.9, 1e-4, 90, 128),
    "ying2018-v3-1024": (32768, 256, "lars", 34, 12, 0.9, 1e-4, 90, 128),
    "jia2018-64k": (65536, 2048, "lars", 24.699, 31, 0.951807, 1e-4, 90, 32),
    "jia2018-alexnet-64k": (65536, 1024, "lars", 22, 5, 0.9, 5e-4, 95, 64),
    "kumar2019-32k": (32768, 1024, "lars", 31.2, 25, 0.9, 1e-4, 2983 * 32768 / 1281167, 128),
    "kumar2019-32k-unscaled": (32768, 1024, "lars", 31.2, 25, 0.9, 1e-4, 2983 * 32768 / 1281167, 128),
    "kumar2019-32k-tuned": (32768, 1024, "lars", 29.0, 18, 0.929, 1e-4, 2669 * 32768 / 1281167, 128),
    "krishnan2018-32k": (32000, 250, "neumann", 12.5, 5, 0.9, 1e-4, 237, 32),
    "adya2018-65k": (65536, 1024, "nlcg", 1.6, 25 * 90 / 200, 0.9, 1e-4, 90, 64),
    "adya2018-cifar100-16k": (16384, 16, "nlcg", 1.6, 25, 0.9, 2e-4, 200, 1024),
    "mlperf-8xh100": (3264, 8, "lars", 10.7, 2, 0.9, 5e-5, 37, 408),
    "mlperf-3584xh100": (57344, 3584, "lars", 23.0, 32, 0.95, 2.5e-5, 78, 32),
    "mlperf-4096xtpuv4": (32768, 4096, "lars", 27.5, 16, 0.9321, 1e-4, 16 + 1731 * 32768 / 1281167, 64),
    "shampoo-mlperf-32k": (
        32768,
        128,
        "shampoo",
        16.22,
        5 * 39.25 * 32768 / 1281167,
        0.96,
        6.248644874764753e-05,
        1727 * 32768 / 1281167,
        256,
    ),
    "rsb-a1": (2048, 4, "lamb", 5e-3, 5, 0.9, 0.01, 600, 512),
    "rsb-a2": (2048, 4, "lamb", 5e-3, 5, 0.9, 0.02, 300, 512),
    "rsb-a3": (2048, 4, "lamb", 8e-3, 5, 0.9, 0.02, 100, 512),
    "torchvision-v2": (1024, 8, "sgd", 0.5, 5, 0.9, 2e-5, 600, 128),
}
# top-1, minutes, images/s as published; None where the source gives none or it was not found
CLAIMED: dict[str, tuple[float | None, float | None, float | None]] = {
    "ffcv-88epochs": (0.784, 77.2, None),
    "goyal2017-8k": (0.7626, 60, None),
    "codreanu2017-448nodes": (0.7615, 65, None),
    "codreanu2017-64nodes": (0.763, 240, 6303),
    "codreanu2017-collapsed-ensemble": (0.775, None, None),
    "codreanu2017-1536nodes": (None, 28, None),
    "akiba2017-32k": (0.749, 15, None),
    "you2017-32k": (0.754, 20, None),
    "ying2018-32k": (0.763, 2.2, 1.05e6),
    "ying2018-64k": (0.752, 1.8, None),
    "ying2018-v3-1024": (0.763, 2.2, 1.05e6),
    "jia2018-64k": (0.758, 6.6, None),
    "jia2018-alexnet-64k": (0.587, 4, None),
    "kumar2019-32k": (0.759, 1.282, 1298041),
    "kumar2019-32k-unscaled": (0.759, 1.207, None),
    "kumar2019-32k-tuned": (0.759, 1.118, None),
    "krishnan2018-32k": (0.76, None, None),
    "adya2018-65k": (None, None, None),
    "adya2018-cifar100-16k": (0.56, None, None),
    "mlperf-8xh100": (0.759, 13.87, 54057),
    "mlperf-3584xh100": (0.759, 0.183, 9855127),
    "mlperf-4096xtpuv4": (0.759, 0.191, 7836543),
    "shampoo-mlperf-32k": (0.7595, 3.32, 357107),
    "rsb-a1": (0.8038, None, None),
    "rsb-a2": (0.7983, None, None),
    "rsb-a3": (0.7805, None, None),
    "torchvision-v2": (0.8086, None, None),
}


def test_every_published_run_is_checked_here():
    assert sorted(CITED) == sorted(CLAIMED) == PUBLISHED
    assert sorted([*OWN, *PUBLISHED]) == preset_names()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_run_has_the_cited_settings(name):
    config = load(resolve_preset(name))
    train, ranks = config.train, config.launch.processes * config.launch.nodes
    optimizer, schedule = train.optimizer, train.schedule
    found = (
        train.global_batch,
        ranks,
        optimizer.name,
        schedule.learning_rate,
        schedule.warmup_epochs,
        optimizer.momentum,
        optimizer.weight_decay,
        train.epochs,
        batch_norm_group(config, ranks).total,
    )
    assert found[2] == CITED[name][2]
    assert [*found[:2], *found[3:]] == pytest.approx([*CITED[name][:2], *CITED[name][3:]], rel=2e-4)
    assert not optimizer.decay_all, "none of them decays batch norm"
    decays_biases = name.startswith(("ying", "codreanu", "adya2018-cifar")) or name == "kumar2019-32k"
    assert optimizer.decay_biases == decays_biases, "where the authors' code spares batch norm alone"


# What the tiny runs of the golden trajectories leave out. Crop: range of the area, or the fraction of the short side;
# whether resizing is bicubic, or random; part of the short side that is evaluated; epochs between evaluations, and of
# the first.
WHOLE, CENTRE = (0.08, 1.0), 224 / 256
SEEN: dict[str, tuple[tuple[float, float] | float, bool | str, float, float, float]] = {
    "ying2018-32k": (WHOLE, True, CENTRE, 4, 4),
    "ying2018-64k": (WHOLE, True, CENTRE, 4, 4),
    "ying2018-v3-1024": (WHOLE, True, CENTRE, 4, 4),
    "kumar2019-32k": (WHOLE, True, CENTRE, 4, 4),
    "kumar2019-32k-unscaled": (WHOLE, True, CENTRE, 4, 4),
    "kumar2019-32k-tuned": (WHOLE, True, CENTRE, 4, 4),
    "mlperf-4096xtpuv4": ((0.05, 1.0), True, CENTRE, 4, 4),
    "shampoo-mlperf-32k": ((0.05, 1.0), True, CENTRE, 4, 4),
    "mlperf-8xh100": (WHOLE, False, CENTRE, 4, 3),  # their last evaluation is at 35
    "mlperf-3584xh100": (WHOLE, False, CENTRE, 4, 1),  # at 77
    "codreanu2017-448nodes": (WHOLE, True, CENTRE, 5, 5),
    "codreanu2017-64nodes": (WHOLE, True, CENTRE, 2, 2),
    "codreanu2017-collapsed-ensemble": (WHOLE, True, CENTRE, 2, 2),
    "codreanu2017-1536nodes": (WHOLE, True, CENTRE, 1, 1),
    "jia2018-64k": (WHOLE, False, CENTRE, 5, 5),
    "jia2018-alexnet-64k": (227 / 256, False, 227 / 256, 5, 5),
    "goyal2017-8k": (WHOLE, False, CENTRE, 1, 1),
    "you2017-32k": (WHOLE, False, CENTRE, 5, 5),
    "akiba2017-32k": (WHOLE, False, CENTRE, 1, 1),
    "krishnan2018-32k": (WHOLE, False, CENTRE, 5, 5),
    "adya2018-65k": (WHOLE, False, CENTRE, 5, 5),
    "rsb-a1": (WHOLE, "random", 0.95, 20, 20),
    "rsb-a2": (WHOLE, "random", 0.95, 10, 10),
    "rsb-a3": (WHOLE, "random", 0.95, 10, 10),
    "torchvision-v2": (WHOLE, False, 224 / 232, 20, 20),
    "ffcv-88epochs": (WHOLE, False, CENTRE, 8, 8),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_run_sees_the_cited_pixels_at_the_cited_epochs(name):
    config = load(resolve_preset(name))
    crop, evaluate = config.input.crop, config.evaluate
    assert crop.flip == 0.5
    assert crop.ratio == pytest.approx((3 / 4, 4 / 3))
    first = evaluate.offset or evaluate.every_epochs
    if name == "adya2018-cifar100-16k":
        assert (crop.padding, config.input.per_image_standardization) == (4, True)
        assert (evaluate.crop_fraction, evaluate.every_epochs, first) == (1.0, 10, 10)
        return
    assert (crop.padding, config.input.per_image_standardization) == (None, False)
    filters = {"bicubic": True, "bilinear": False}
    interpolation = filters.get(config.input.interpolation, config.input.interpolation)
    found = (crop.short_side or crop.scale, interpolation, evaluate.crop_fraction)
    assert found == (SEEN[name][0], SEEN[name][1], pytest.approx(SEEN[name][2], abs=1e-4))
    assert (evaluate.every_epochs, first) == SEEN[name][3:]


# algorithm, ranks of a row (None: those of a host), update, ranks that share it
COMMUNICATION = {
    **dict.fromkeys(("ying2018-32k", "ying2018-64k"), ("torus2d", None, "replicated", "row")),
    **dict.fromkeys(("mlperf-3584xh100", "shampoo-mlperf-32k"), ("torus2d", None, "replicated", "row")),
    **dict.fromkeys(("ying2018-v3-1024", "mlperf-4096xtpuv4", "adya2018-65k"), ("torus2d", None, "sharded", "row")),
    **dict.fromkeys(
        ("kumar2019-32k", "kumar2019-32k-unscaled", "kumar2019-32k-tuned"), ("torus2d", None, "sharded", "world")
    ),
    **dict.fromkeys(("jia2018-64k", "jia2018-alexnet-64k"), ("hybrid", 16, "replicated", "row")),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_run_communicates_as_cited(name):
    train = load(resolve_preset(name)).train
    reduce = train.all_reduce
    found = (reduce.algorithm, reduce.row, train.weight_update, reduce.shard_over)
    assert found == COMMUNICATION.get(name, ("flat", None, "replicated", "row"))
    assert (reduce.wire_row, reduce.wire_column) == ("fp32", "fp32")


def test_shampoo_is_that_of_the_entry():
    """Its own constants, and those that its code leaves at their defaults: all are written out."""
    train = load(resolve_preset("shampoo-mlperf-32k")).train
    own = train.optimizer.shampoo
    assert (own.beta2, own.eps, own.exponent, own.start_step) == (0.75, 1e-8, 4, 5)
    assert (own.block, own.vectors, own.every_steps, own.graft, train.optimizer.nesterov) == (128, True, 1, "sgd", True)
    schedule = train.schedule
    assert (schedule.name, schedule.power, schedule.end_learning_rate) == ("polynomial", 2.0, 0.0)
    assert (train.label_smoothing, train.target_top1) == (0.2, 0.759)
    rates = schedules.step_table(train, 1281167)[:, 0]
    assert len(rates) == 1727
    steps = np.arange(len(rates))
    decayed = 16.22 * (1 - np.clip((steps - 196.25) / 1531.75, 0, 1)) ** 2
    entry = np.where(steps <= 196.25, 16.22 * steps / 196.25, decayed)
    np.testing.assert_allclose(rates, entry, rtol=0, atol=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_run_has_its_claim_and_would_start_on_a_cluster(name):
    config = load(resolve_preset(name))
    claim = config.claim
    assert (claim.top1, claim.minutes, claim.images_per_second) == CLAIMED[name]
    assert find_problems(config, "cluster") == []
    check_ranks(config, config.launch.processes * config.launch.nodes)
    assert train_batch(config) >= 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_head_gives_claim_source_and_what_is_ours(name):
    head = " ".join(line.removeprefix("#") for line in resolve_preset(name).read_text().split("\n\n")[0].splitlines())
    assert "Claim:" in head
    assert "Ours:" in head
    sources = ("Paper:", "Paper (not read):", "Authors' code:", "Result logs:", "Code and result logs:")
    assert any(label in head for label in sources)
    source = load(resolve_preset(name)).claim.source
    assert source.split(";")[0].split(",")[0].removesuffix(" (recalled)") in head


def train_batch(config):
    """Images of one forward pass of one rank."""
    return config.train.global_batch // (config.launch.processes * config.launch.nodes * config.train.accumulation)


IMAGENET = 1_281_167


def test_the_classic_recipe_is_goyals():
    train = load(resolve_preset("goyal2017-8k")).train
    assert train.schedule.learning_rate == pytest.approx(0.1 * train.global_batch / 256)
    assert (train.schedule.warmup_start, train.schedule.milestones) == (0.1, (30, 60, 80))
    rates = schedules.step_table(train, IMAGENET)[:, 0]
    assert rates[[0, -1]].tolist() == pytest.approx([0.1, 0.0032])


# policy, magnitude, erasing, repeats, stochastic depth, mixup, label smoothing, threshold, px trained and evaluated
AUGMENTED = {
    "rsb-a1": ("rand_augment", 7, 0.0, 3, 0.05, 0.2, 0.1, None, 224, 224),
    "rsb-a2": ("rand_augment", 7, 0.0, 3, 0.05, 0.1, 0.0, 0.2, 224, 224),
    "rsb-a3": ("rand_augment", 6, 0.0, 1, 0.0, 0.1, 0.0, 0.2, 160, 224),
    "torchvision-v2": ("trivial_augment", 6, 0.1, 4, 0.0, 0.2, 0.1, None, 176, 224),
}


@pytest.mark.parametrize("name", AUGMENTED)
def test_a_long_recipe_has_its_papers_regularisers(name):
    config = load(resolve_preset(name))
    train, augment = config.train, config.input.augment
    assert (
        augment.policy,
        augment.rand_augment.magnitude,
        augment.erase,
        config.input.repeats,
        config.model.stochastic_depth,
        train.mix.mixup,
        train.label_smoothing,
        train.binary_threshold,
        config.input.image_size,
        config.eval_image_size,
    ) == AUGMENTED[name]
    assert (augment.rand_augment.deviation, augment.rand_augment.layers, train.mix.cutmix) == (0.5, 2, 1.0)
    assert (train.loss == "binary_cross_entropy") == name.startswith("rsb")


FFCV_RAMPS = {16: (11, 13), 24: (17, 20), 32: (23, 27), 40: (29, 34), 56: (41, 48), 88: (65, 76)}
"""start_ramp and end_ramp of FFCV's configurations by epochs: between them images grow from 160 to 192 px."""


@pytest.mark.parametrize("epochs", FFCV_RAMPS)
def test_ffcvs_table_says_when_its_images_grow(epochs):
    """At the first whole epoch at which the line between both sizes, in multiples of 32, is nearer to the larger."""
    sides = np.round(np.interp(np.arange(epochs), FFCV_RAMPS[epochs], (160, 192)) / 32) * 32
    (row,) = (
        line.split()[1:]
        for line in resolve_preset("ffcv-88epochs").read_text().splitlines()
        if line.split()[:2] == ["#", str(epochs)]
    )
    assert int(row[1]) == np.argmax(sides == 192)
    phases = f"train.phases=[{{start: {row[1]}, image_size: 192}}]"
    train = load(resolve_preset("ffcv-88epochs"), [f"train.epochs={epochs}", phases]).train
    rates = schedules.step_table(train, IMAGENET)[:, 0]
    per_epoch = IMAGENET / train.global_batch
    want = np.interp(np.arange(len(rates)) / per_epoch, (0, 2, epochs), (1.7e-4, 1.7, 0))
    np.testing.assert_allclose(rates, want, atol=1e-6)
    assert float(row[2]) / 100 <= load(resolve_preset("ffcv-88epochs")).claim.top1


def poly(base, power, length, end=None, warmup=0, start=0.0):
    """Caffe's learning rates of iterations 0 to end: poly or poly_cyc with linear warm-up, in plain numbers."""
    return [
        start + (base - start) * it / warmup if it < warmup else base * (1 - it / length) ** power
        for it in range(length if end is None else end)
    ]


def momentum_of(rates, warmup):
    """Caffe's corrected momentum; each part starts with an empty buffer, which is a momentum of 0 at its first step."""
    return [0.9 * rates[it] / rates[it - 1] if 0 < it < warmup else 0.9 for it in range(len(rates))]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "codreanu2017-448nodes",
            [
                (poly(4.8, 1, 8040, end=7638, warmup=446, start=0.1), 446, 5e-5),
                (poly(0.254, 2, 402), 0, 1e-4),
            ],
        ),
        (
            "codreanu2017-64nodes",
            [
                (poly(1.6, 1, 18720, end=7800, warmup=1560, start=0.1), 1560, 5e-5),
                (poly(1.02, 2, 7500, end=3750), 0, 5e-5),
                (poly(0.764, 2, 7500, end=4750, warmup=1000, start=0.255), 1000, 5e-5),
                (poly(0.572, 2, 7500, end=4750, warmup=1000, start=0.19), 1000, 5e-5),
                (poly(0.143, 2, 1560), 0, 2e-4),
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_codreanus_runs_have_the_solvers_numbers_at_every_iteration(name, parts):
    config = load(resolve_preset(name))
    table = schedules.step_table(config.train, IMAGENET)
    rates = np.concatenate([rates for rates, _, _ in parts])
    assert len(table) == len(rates)
    np.testing.assert_allclose(table[:, 0], rates, rtol=0.01, atol=2e-4)
    momenta = [momentum_of(rates, warmup) for rates, warmup, _ in parts]
    for later in momenta[1:]:
        later[0] = 0.0
    np.testing.assert_allclose(table[:, 1], np.concatenate(momenta), rtol=1e-3, atol=1e-6)
    decays = np.concatenate([np.full(len(rates), decay) for rates, _, decay in parts])
    assert np.array_equal(table[:, 2], decays.astype(np.float32))
    crops = [crop for _, _, crop in schedules.image_phases(config, IMAGENET)]
    assert all(crop == config.input.crop for crop in crops[:-1])
    assert (crops[-1].short_side, crops[-1].flip) == (224 / 256, 0.5)
    assert config.train.optimizer.momentum_form == "unscaled", "Caffe's buffer holds the learning rate"
    assert config.model.batch_norm.momentum == pytest.approx(1 - 0.95)


@pytest.mark.parametrize(
    "name", [name for name in PUBLISHED if load(resolve_preset(name)).train.optimizer.name == "lars"]
)
def test_runs_with_lars_share_what_all_logs_share(name):
    train = load(resolve_preset(name)).train
    assert (train.schedule.name, train.schedule.power) == ("polynomial", 2)
    assert train.optimizer.trust_coefficient == 0.001
    mlperf = name.startswith(("mlperf", "kumar", "ying"))
    assert not mlperf or (train.schedule.end_learning_rate, train.label_smoothing) == (1e-4, 0.1)
    assert train.target_top1 == (0.759 if name.startswith(("mlperf", "kumar")) else None)


def test_the_neumann_run_has_table_1_of_its_paper():
    train = load(resolve_preset("krishnan2018-32k")).train
    found = train.optimizer.neumann
    assert (found.alpha, found.beta, found.gamma) == (1e-7, 1e-5, 0.99)
    assert (found.momentum_start, found.momentum_end) == (0.5, 0.9)
    assert (found.sgd_epochs, found.reset_epochs) == (5, 10)
    assert found == type(found)(), "which are the defaults"
    assert train.global_batch == 250 * 32 * train.accumulation
    rates = schedules.step_table(train, IMAGENET)[:, 0]
    ends = [step_positions(train, IMAGENET).first_step(epoch) for epoch in range(40, 237, 40)]
    np.testing.assert_allclose([rates[end] / rates[end - 1] for end in ends], 0.3, rtol=1e-5)


@pytest.mark.parametrize(("name", "share"), [("adya2018-65k", 90 / 200), ("adya2018-cifar100-16k", 1.0)])
def test_the_runs_of_adya_have_the_programs_defaults_and_the_scripts_schedule(name, share):
    train = load(resolve_preset(name)).train
    assert train.optimizer.nlcg == type(train.optimizer.nlcg)(variant="released")
    schedule = train.schedule
    assert [schedule.warmup_epochs, *schedule.milestones] == pytest.approx([25 * share, 102 * share, 153 * share])
    assert (schedule.warmup_start, schedule.gamma, schedule.warmup_power) == (0.1, 0.1, 0.5)


@pytest.mark.parametrize(
    ("name", "form", "trust", "steps"),
    [
        ("kumar2019-32k", "scaled", "l2_in_loss", 2983),
        ("kumar2019-32k-unscaled", "unscaled", "sum_of_norms", 2983),
        ("kumar2019-32k-tuned", "unscaled", "sum_of_norms", 2669),
    ],
)
def test_kumars_runs_are_the_rows_of_table_1(name, form, trust, steps):
    train = load(resolve_preset(name)).train
    optimizer = train.optimizer
    assert (optimizer.eps, optimizer.momentum_form, optimizer.trust) == (1e-5, form, trust)
    assert (train.weight_update, train.all_reduce.shard_over) == ("sharded", "world")
    assert schedules.total_steps(train, IMAGENET) == steps


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("ying")])
def test_yings_runs_have_the_optimizer_of_their_month(name):
    """tensorflow 5c8077a with the loss of tensorflow/tpu f4fa4d7, and the schedule of lars_util.py at every step."""
    train = load(resolve_preset(name)).train
    optimizer = train.optimizer
    assert (optimizer.momentum_form, optimizer.trust, optimizer.decay_biases) == ("scaled", "l2_in_loss", True)
    assert (optimizer.trust_coefficient, optimizer.effective_eps, optimizer.nesterov) == (0.001, 0, False)
    peak, epochs = {32768: (34.0, 12), 65536: (35.0, 34)}[train.global_batch]
    rates = schedules.step_table(train, IMAGENET)[:, 0]
    steps, warmup = np.arange(len(rates)), epochs * IMAGENET // train.global_batch
    decayed = (peak - 1e-4) * (1 - (steps - warmup) / (len(rates) - warmup + 1)).clip(0, 1) ** 2 + 1e-4
    want = np.where(
        steps * train.global_batch / IMAGENET <= epochs, peak * steps * train.global_batch / IMAGENET / epochs, decayed
    )
    np.testing.assert_allclose(rates, want, atol=0.06)


def test_jias_groups_have_16_gpus():
    for name in ("jia2018-64k", "jia2018-alexnet-64k"):
        train = load(resolve_preset(name)).train
        assert (train.all_reduce.algorithm, train.all_reduce.row, train.label_smoothing) == ("hybrid", 16, 0)


def test_the_snapshots_of_codreanus_ensemble_are_those_of_the_solvers():
    config = load(resolve_preset("codreanu2017-collapsed-ensemble"))
    positions = step_positions(config.train, IMAGENET)
    starts = [phase.start for phase in schedules.schedule_phases(config.train)]
    assert [positions.first_step(epoch) for epoch in [*starts[1:], config.train.epochs]] == [
        7800,
        11550,
        16300,
        21050,
    ]
    found = [positions.first_step(epoch) for epoch in config.checkpoint.snapshots]
    assert found == [11550, 16300, 21050]


def test_ying_on_tpus_is_ying_on_gpus():
    """One recipe, two engines: what changes the numbers is the same, but for where pictures are cut into groups."""
    theirs, ours = (result_values(load(resolve_preset(name))) for name in ("ying2018-32k", "ying2018-v3-1024"))
    changed = {name for name in theirs if theirs[name] != ours[name]}
    assert changed <= {"data.source", "input.groups"}


@pytest.mark.parametrize("name", [name for name in OWN if name.startswith("tpu")])
def test_a_preset_for_tpus_fits_its_slice(name):
    config = load(resolve_preset(name))
    topology = find_topology(config.launch.hardware)
    assert topology.chip_count == int(name.rpartition("-")[2])
    assert config.launch.nodes == find_hardware(config.launch.hardware).hosts
    assert config.input.groups % config.launch.nodes == 0
    check_ranks(config, topology.device_count)
