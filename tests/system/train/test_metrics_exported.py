"""Real stages export the catalogue: each of their series is in it, and a stage exports each of its entries."""

import shutil
import subprocess
from pathlib import Path

import pytest

from podscale.data import native
from podscale.telemetry.catalogue import CATALOGUE
from tests.support.commands import SMALL_DIGITS, Command, set_options
from tests.support.exposition import families, final_text, foreign, names
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(900)  # the fixture runs three stages, on a machine that may be busy

SETTINGS = {
    "input.record_cache_bytes": 2**30,
    "input.decoded_cache_bytes": 2**30,
    "run.id": "exported",
    "telemetry.linger_seconds": 120,
    "train.epochs": 0.3,
    "train.schedule.warmup_epochs": 0,
    "checkpoint.every_steps": 2,
    "train.all_reduce.algorithm": "auto",
    "claim.images_per_second": 1000,
}
NEEDS_A_GPU = {
    "train_sampled_phase_seconds": "steps are sampled only inside a CUDA graph",
    "train_peak_flops": "the hardware table has GPUs",
    **{name: "by NVML" for name in CATALOGUE if name.startswith("gpu_")},
}
NOT_IN_A_SHORT_CALM_RUN = {
    "shard_rejects": "every digit is usable; see test_shards_watch",
    "train_native_refusals": "no image is refused; see test_cpu",
    "train_straggler_rank": "exported once an interval is over; see test_stragglers",
    "train_straggler_ratio": "exported once an interval is over; see test_stragglers",
    "train_hang_limit_seconds": "learned from more steps than there are here",
}
OF_SERVERS = {name for name, entry in CATALOGUE.items() if entry.exporter == "server"}  # see test_serve
FIRST_RANK_ONLY = [name for name, entry in CATALOGUE.items() if entry.exporter == "rank 0"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def texts(directory: Path) -> dict[str, str]:
    """Return the last text of each stage's endpoint."""
    (directory / "run.yaml").write_text(SMALL_DIGITS)
    port = free_port()
    settings = {**SETTINGS, "telemetry.port": port}
    options = set_options(*(f"{name}={value}" for name, value in settings.items()))
    exposed = {}
    for stage in ("shard", "train", "evaluate"):
        command = Command(directory, stage, "run.yaml", *options)
        try:
            exposed[stage] = final_text(command, f"http://127.0.0.1:{port}/metrics")
            ended = command.end()
        finally:
            command.kill()
        assert ended.code == 0, ended.err
    return exposed


def test_every_series_is_in_the_catalogue_with_its_labels(texts: dict[str, str]) -> None:
    assert [line for text in texts.values() for line in foreign(text)] == []


def test_every_entry_is_exported_or_has_a_reason(texts: dict[str, str]) -> None:
    exported = set().union(*map(names, texts.values()))
    assert sorted(set(CATALOGUE) - exported - OF_SERVERS - set(NEEDS_A_GPU) - set(NOT_IN_A_SHORT_CALM_RUN)) == []


def test_only_rank_0_exports_the_series_of_the_first_rank(texts: dict[str, str]) -> None:
    ranks = {
        family.name.removeprefix("podscale_"): {sample.labels["rank"] for sample in family.samples}
        for family in families(texts["train"])
        if any("rank" in sample.labels for sample in family.samples)
    }
    assert ranks["train_images"] == {"0", "1"}
    wrong = {name: ranks[name] for name in FIRST_RANK_ONLY if ranks.get(name, {"0"}) != {"0"}}
    assert wrong == {}


def test_promtool_finds_no_problem_in_the_exposition(texts: dict[str, str]) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    for text in texts.values():
        check = subprocess.run(["promtool", "check", "metrics"], input=text.encode(), capture_output=True)
        assert (check.returncode, check.stdout + check.stderr) == (0, b"")


def test_metrics_of_a_training_add_up(texts: dict[str, str]) -> None:
    values = {
        (sample.name, sample.labels.get("rank"), sample.labels.get("kind")): sample.value
        for family in families(texts["train"])
        for sample in family.samples
    }
    images = [values["podscale_train_images_total", rank, None] for rank in "01"]
    steps = values["podscale_train_steps_total", "0", None]
    assert images[0] == images[1] == steps * 32
    assert values["podscale_train_planned_steps", "0", None] == steps
    assert values["podscale_train_completed_steps", "0", None] == steps
    assert values["podscale_train_done", "0", None] == 1
    assert values["podscale_train_target_images_per_second", "0", None] == 1000
    flops = values["podscale_train_model_flops_total", "0", None] / images[0]
    assert 1e6 < flops < 1e9  # a tiny network on 16 px images
    assert values["podscale_train_memory_bytes", "1", "resident"] > 50e6
    assert values["podscale_train_memory_bytes", "1", "cached_records"] > 1438 * 100, "all shards of both splits"
    cached = [values["podscale_train_memory_bytes", rank, "cached_decoded"] for rank in "01"]
    assert 0.8 < sum(cached) / (sum(images) * 3 * 8 * 8) < 1.1, "each arrived once; a shared one takes 16 bytes more"
    assert values["podscale_train_checkpoint_interval_seconds", "0", None] > 0
    assert values["podscale_eval_images_total", "0", None] + values["podscale_eval_images_total", "1", None] == 359


@pytest.mark.skipif(not native.can_share_images(), reason="the native extension is not installed")
def test_the_ranks_of_a_node_share_a_decoded_cache(texts: dict[str, str], directory: Path) -> None:
    logs = [(directory / f"runs/exported/logs/rank-{rank}.log").read_text() for rank in range(2)]
    assert all("decoded cache of 2.0 GiB" in log for log in logs)


def test_metrics_of_a_build_add_up(texts: dict[str, str]) -> None:
    values = {
        (sample.name, *(value for name, value in sample.labels.items() if name != "run")): sample.value
        for family in families(texts["shard"])
        for sample in family.samples
    }
    for split, images in (("train", 1438), ("validation", 359)):
        assert values["podscale_shard_images_total", split] == values["podscale_shard_planned_images", split] == images
    assert values["podscale_shard_bytes_total", "read"] >= values["podscale_shard_bytes_total", "written"] > 1000
    assert values[("podscale_shard_shards_total",)] > 2
    assert values["podscale_shard_phase_seconds_total", "pack"] > 0


def test_an_evaluation_counts_its_images(texts: dict[str, str]) -> None:
    (images,) = [family for family in families(texts["evaluate"]) if family.name == "podscale_eval_images"]
    assert sum(sample.value for sample in images.samples) == 359
    assert {"eval_top1_ratio", "eval_top5_ratio"} <= names(texts["evaluate"])
