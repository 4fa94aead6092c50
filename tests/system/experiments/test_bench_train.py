"""`podscale bench train` on a CPU: real processes, tiny networks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from podscale.bench import sweep
from podscale.bench.sweep import SweepRow, SweepSettings, read_rows, run_sweep
from podscale.bench.train_report import format_report
from podscale.bench.variants import CPU_VARIANTS, GPU_VARIANTS, BenchVariant, named_sweep, variant_grid
from podscale.cli.bench import RESNET50
from podscale.config import RunConfig, load
from podscale.errors import InputError
from tests.support.commands import set_options
from tests.support.refusals import refused
from tests.support.xla import QUICK_XLA

TINY = (
    "model.name=resnet18", "model.stem=small", "model.width=4", "input.image_size=16", "train.global_batch=4",
)  # fmt: skip


def base(more: list[str]) -> RunConfig:
    return load(None, [*TINY, *more])


def measure(variants: list[BenchVariant], rows_file: Path, **settings: float) -> list[SweepRow]:
    chosen = SweepSettings(warmup=2, steps=3, parts=2, **settings)  # type: ignore[arg-type]
    return run_sweep(base, variants, chosen, rows_file / "rows.json", lambda row, rows: None)


def test_the_command_measures_and_goes_on_where_a_variant_fails(tmp_path: Path) -> None:
    options = ["--warmup", "5", "--steps", "3", "--parts", "2", "--profile", "--out", str(tmp_path)]
    vary = ["--vary", "train.cuda_graph=true,false", "--vary", "batch=4"]
    command = [sys.executable, "-m", "podscale", "bench", "train", *set_options(*TINY), *vary, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("train-*.md")
    text = table.read_text()
    assert text.strip() == done.stdout.strip()
    assert str(tmp_path) not in text
    assert "| cuda_graph=false, batch=4 | synthetic | 4 |" in text
    failed, succeeded = read_rows(table.with_suffix(".json"))
    assert failed.found is None
    assert "CUDA" in failed.reason
    assert failed.reason in text
    assert succeeded.found is not None
    measured = succeeded.found
    assert measured["ranks"] == 1
    assert measured["images_per_second"] == pytest.approx(4 / measured["step_seconds"])
    parts = measured["part_seconds"]
    assert set(parts) == {"forward", "backward", "allreduce_wait", "optimizer"}
    assert parts["forward"] > 0
    assert sum(parts.values()) < 20 * measured["step_seconds"]
    assert measured["kernels"] == []  # there is no GPU
    assert {"aten::convolution", "aten::convolution_backward", "aten::copy_"} <= measured["counted_bytes"].keys()
    assert "| convolutions and matrix products |  |  |  |" in text
    assert measured["training_flops_per_image"] > 0


def test_several_ranks_a_row_is_measured_once_and_time_is_limited(tmp_path: Path, monkeypatch) -> None:
    ranks = {"launch.processes": 2, "launch.threads": 1}
    two = BenchVariant("two", {**ranks, "train.all_reduce.algorithm": "auto"}, batch=4)
    (row,) = measure([two], tmp_path)
    assert row.found is not None, row.reason
    assert (row.found["ranks"], row.found["batch"]) == (2, 4)
    chosen = row.found["choices"]["all_reduce"]["algorithm"]
    assert f"`two` chose by measurements: all_reduce: algorithm {chosen}" in "\n".join(format_report("x", [row]))
    rate = row.found["images_per_second"]
    # no more measurements are possible
    monkeypatch.setitem(sweep.BENCHMARK_MODULES, "pytorch", "podscale.no_such_module")
    again, other = measure([two, BenchVariant("other", batch=6)], tmp_path)
    assert again.found is not None
    assert again.found["images_per_second"] == rate
    assert "no_such_module" in other.reason
    monkeypatch.undo()
    (late,) = measure([BenchVariant("late", batch=8)], tmp_path, time_limit=0.3)
    assert late.found is None
    assert " 0 s" in late.reason
    (never,) = measure([BenchVariant("never", batch=8)], tmp_path, budget=1)
    assert (never.found, never.seconds) == (None, 0)
    assert never.reason
    rows_on_disk = read_rows(tmp_path / "rows.json")
    assert rate in [row.found["images_per_second"] for row in rows_on_disk if row.found], (
        "other sweeps' rows are not lost"
    )


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_jax_engine_is_measured_by_its_own_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """Two steps a call: the warm-up of five and the three measured ones do not end with a call of two."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", QUICK_XLA)
    jax = {"train.engine": "jax", "launch.threads": 1, "launch.processes": processes}
    variants = [
        BenchVariant("jax", {**jax, "train.steps_per_call": 2}, batch=4),
        BenchVariant("torch", {"launch.processes": 1}, batch=4),
    ]
    settings = SweepSettings(warmup=5, steps=3, parts=1)
    rows = run_sweep(base, variants, settings, tmp_path / "rows.json", lambda row, rows: None)
    by_jax, by_torch = (row.found for row in rows)
    assert by_jax is not None, rows[0].reason
    assert by_torch is not None, rows[1].reason
    assert by_jax.keys() <= by_torch.keys()
    assert "jax" in by_jax["versions"]
    assert (by_jax["ranks"], by_jax["batch"], by_jax["part_seconds"]) == (processes, 4, {})
    assert by_jax["images_per_second"] == pytest.approx(4 / by_jax["step_seconds"])
    assert 0 < by_jax["step_median_seconds"] <= by_jax["step_p95_seconds"] < 3 * by_jax["step_seconds"]
    assert by_jax["first_step_seconds"] > by_jax["step_seconds"]  # it compiles
    assert by_jax["training_flops_per_image"] == by_torch["training_flops_per_image"]
    assert by_jax["memory_bytes"] > 2**20
    assert {"data_wait", "h2d", "forward_backward"} <= by_jax["host_seconds"].keys()
    assert "| jax | synthetic | 4 |" in "\n".join(format_report("x", rows))


def test_real_images(make_shard_set, tmp_path: Path) -> None:
    shards = make_shard_set()
    variant = BenchVariant("real", batch=4, real_images=True)
    with refused(field="--shard-set"):
        measure([variant], tmp_path)
    (row,) = measure([variant], tmp_path, shard_set=str(shards))  # type: ignore[arg-type]
    assert row.found is not None, row.reason
    assert row.key["images"] == "real"
    assert row.key["options"]["input.loader"] == "auto"
    assert "data_wait" in row.found["host_seconds"]


@pytest.mark.parametrize("variants", [GPU_VARIANTS, CPU_VARIANTS])
def test_every_named_variant_is_a_valid_document_of_its_own(variants: list[BenchVariant]) -> None:
    settings = SweepSettings(shard_set="somewhere")
    documents = [
        sweep.variant_document(lambda more: load(None, [*RESNET50, "launch.processes=1", *more]), variant, settings)
        for variant in variants
    ]
    keys = [json.dumps(sweep.row_key(d, v, settings)) for d, v in zip(documents, variants, strict=True)]
    assert len(set(keys)) == len(variants) == len({variant.name for variant in variants})


def test_grids_and_names() -> None:
    names = [variant.name for variant in variant_grid(["train.compile=off,default", "batch=2,4"], real_images=False)]
    assert names == [f"compile={mode}, batch={batch}" for mode in ("off", "default") for batch in (2, 4)]
    assert variant_grid([], real_images=False) == [BenchVariant("as the document says")]
    assert [v.changes for v in variant_grid(["train.cuda_graph=true"], real_images=True)] == [
        {"train.cuda_graph": True}
    ]
    for wrong in ("train.compile", "batch=few"):
        with pytest.raises(InputError) as caught:
            variant_grid([wrong], real_images=False)
        assert caught.value.field.startswith("--vary")
    with refused("gpu, cpu", field="--sweep", got="tpu"):
        named_sweep("tpu", real_images=False)
    assert all(not variant.real_images for variant in named_sweep("gpu", real_images=False))


CHIPS = [  # fraction of the published rate at 7,000 images/s, and the last milestone passed
    ("NVIDIA H200", "0.88", "7000"),
    ("NVIDIA H100 80GB HBM3", "1.00", "7000"),
    ("NVIDIA H100 PCIe", None, None),
    ("Tesla T4", None, None),
]


@pytest.mark.parametrize(("device", "fraction", "passed"), CHIPS)
def test_each_chip_has_its_own_reference(device: str, fraction: str | None, passed: str | None) -> None:
    measurements = {
        "device": device, "versions": {}, "ranks": 1, "batch": 400, "images_per_second": 7000.0,
        "step_median_seconds": 0.05, "step_p95_seconds": 0.051, "host_seconds": {}, "part_seconds": {},
        "memory_bytes": 2**30, "first_step_seconds": 3.0, "training_flops_per_image": 24_300_000_000,
    }  # fmt: skip
    options = {"model.name": "resnet50", "input.image_size": "224", "train.precision": "bf16"}
    text = "\n".join(format_report("x", [SweepRow("fast", {"images": "synthetic", "options": options}, measurements)]))
    assert ("published" in text) == (fraction is not None)
    if fraction:
        assert f" {fraction} of" in text
        assert text.split("passed")[1].split(".")[0].split(", ")[-1].strip() == passed


def test_what_rows_say_together() -> None:
    def row(name: str, rate: float, images: str = "synthetic", **options: str) -> SweepRow:
        measurements = {
            "device": "NVIDIA H200", "versions": {"torch": "2"}, "ranks": 1, "batch": 400, "images_per_second": rate,
            "step_median_seconds": 0.05, "step_p95_seconds": 0.051, "host_seconds": {"data_wait": 0.001},
            "part_seconds": {"forward": 0.01, "backward": 0.03}, "memory_bytes": 2**30, "first_step_seconds": 3.0,
            "training_flops_per_image": 24_300_000_000,
        }  # fmt: skip
        known = {"model.name": "resnet50", "input.image_size": "224", "input.loader": "synthetic"}
        chosen = {name.replace("__", "."): value for name, value in options.items()}
        return SweepRow(name, {"images": images, "options": {**known, **chosen}}, measurements)

    rows = [
        row("fast", 7000.0, train__precision="bf16"),
        row("slow", 2000.0, train__precision="fp32"),
        row("photos", 6930.0, "real", train__precision="bf16", input__loader="auto", input__workers="8"),
        SweepRow("broken", {"images": "synthetic", "options": {}}, None, "out of memory: CUDA | tried"),
    ]
    text = "\n".join(format_report("podscale bench train", rows))
    assert "| fast | synthetic | 400 | 7,000 | 17.2% | 50.0, 51.0 | 10.0 | 30.0 |" in text  # 7000 x 24.3e9 / 989.4e12
    assert "| broken | 0 | out of memory: CUDA / tried |" in text
    conclusions = text.partition("| photos |")[2].partition("Not measured")[0].splitlines()
    for parts in (
        (" 0.88 ", "H200", "7,960", "passed 5500, 7000."),
        ("3.50 times", "fp32", "`fast`"),
        ("99.0%", "98%", "`photos`"),
    ):
        assert any(all(part in line for part in parts) for line in conclusions), parts
