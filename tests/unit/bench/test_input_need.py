"""Need of a run for images, and the headroom of a host: the arithmetic."""

from pathlib import Path

import pytest

from podscale import models
from podscale.bench.input_headroom import CORE_RATES, Headroom, expected_core_rate, remedies
from podscale.bench.input_need import (
    RESNET50_FLOPS,
    TrainingDevices,
    claimed_need,
    estimate_need,
    published_need,
    recorded_need,
    training_devices,
)
from podscale.config import RunConfig, load
from podscale.monitoring.rule_files import ALERT_RULES
from podscale.pipelines import presets
from podscale.util import host_info

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("gpus", "rate", "chip"),
    [([], 7000.0, "H100"), (["NVIDIA H200"], 7960.0, "H200"), (["unknown NVIDIA GPU"], 7000.0, "H100")],
)
def test_the_need_without_a_run_is_the_published_rate_of_the_gpu(gpus: list[str], rate: float, chip: str) -> None:
    need = published_need(gpus)
    assert (need.per_second, need.basis) == (rate, "published")
    assert f" {chip};" in need.source


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Set the devices of this host."""

    def set_devices(gpus: list[str] | None = None, tpus: list[str] | None = None, cores: int = 4) -> None:
        monkeypatch.setattr(host_info, "gpu_names", lambda: gpus or [])
        monkeypatch.setattr(host_info, "visible_gpus", lambda: len(gpus or []))
        monkeypatch.setattr(host_info, "tpu_chips", lambda: tpus or [])
        monkeypatch.setattr(host_info, "cpu_count", lambda: cores)

    return set_devices


def document(hardware: str | None = None, processes: int = 0, precision: str = "bf16") -> RunConfig:
    launch = {"hardware": hardware, "processes": processes}
    return RunConfig.model_validate({"launch": launch, "train": {"precision": precision}})


def test_the_devices_are_those_of_this_host_before_those_of_the_document(machine) -> None:
    machine(["NVIDIA A100-SXM4-80GB"] * 8)
    check_devices(document("nvidia-h100-80gb x4"), 8, "A100")
    check_devices(document(processes=2), 2, "A100")
    machine(tpus=["v5e"] * 4)
    check_devices(document(), 4, "TPU v5e")
    machine()
    check_devices(document("nvidia-h100-80gb x4"), 4, "H100", from_document=True)
    check_devices(document("tpu-v4-2x2x2"), 4, "TPU v4", from_document=True)
    for hardware in (None, "cpu"):
        check_devices(document(hardware), 4, "CPU core")


def check_devices(config: RunConfig, count: int, name: str, *, from_document: bool = False) -> None:
    devices = training_devices(config)
    assert (devices.count, devices.name) == (count, name)
    assert str(devices).startswith(f"{count} {name}")
    assert ("launch.hardware" in str(devices)) == from_document


def test_a_gpu_without_a_known_peak_counts_as_an_h100_and_says_so(machine) -> None:
    machine(["Radeon"])
    devices = training_devices(document())
    assert devices.name == "H100"
    assert "Radeon in bf16" in devices.location


def test_the_flop_of_the_published_network_are_those_of_the_catalogue() -> None:
    spec = models.model_spec(RunConfig.model_validate({"model": {"name": "resnet50"}}).model, 1000)
    assert pytest.approx(spec.training_flops(224), rel=0.001) == RESNET50_FLOPS


@pytest.mark.parametrize(
    ("devices", "flops", "rate"),
    [
        (TrainingDevices("H100", 8, 989.4, 3350.0, "here"), RESNET50_FLOPS, 8 * 7000.0),
        (TrainingDevices("H200", 1, 989.4, 4800.0, "here"), RESNET50_FLOPS / 2, 2 * 7960.0),
        (TrainingDevices("H100", 1, 66.9, 1675.0, "here"), RESNET50_FLOPS, 7000.0 * (66.9 / 989.4 / 2) ** 0.5),
        (TrainingDevices("A100", 1, 312.0, 2039.0, "here"), RESNET50_FLOPS, 7000 * (312 * 2039 / 989.4 / 3350) ** 0.5),
        (TrainingDevices("CPU core", 4, 0.017, 0.0, "here"), 0.5e9, 4 * 34.0),
    ],
)
def test_an_estimate_scales_with_flop_peak_and_devices(devices: TrainingDevices, flops: float, rate: float) -> None:
    need = estimate_need("a network at 64 px", flops, devices)
    assert need.per_second == pytest.approx(rate, rel=1e-3)
    assert need.basis == "estimate"
    for part in ("a network at 64 px", f"{flops / 1e9:.3g} GFLOP", str(devices)):
        assert part in need.source


@pytest.mark.parametrize(
    ("preset", "chip", "chips"), [("kumar2019-32k", "v3", 1024), ("mlperf-4096xtpuv4", "v4", 4096)]
)
def test_the_estimate_of_a_tpu_is_near_the_published_rate(machine, preset: str, chip: str, chips: int) -> None:
    machine(tpus=[chip])
    config = load(presets.resolve_preset(preset), [])
    need = estimate_need("resnet50", RESNET50_FLOPS, training_devices(config))
    assert config.claim.images_per_second is not None
    assert need.per_second == pytest.approx(config.claim.images_per_second / chips, rel=0.2)


def test_fp32_is_slower_by_its_peak_and_the_bytes_of_its_numbers(machine) -> None:
    machine(["NVIDIA H100 80GB HBM3"])
    half, full = (training_devices(document(precision=name)) for name in ("bf16", "fp32"))
    assert (full.tflops, full.bandwidth) == (66.9, half.bandwidth / 2)


def test_a_recorded_need_leaves_out_the_time_of_waiting_for_images() -> None:
    need = recorded_need("runs/a/metrics.jsonl", 6000.0, 2, 0.25)
    assert (need.per_second, need.basis) == (4000.0, "recorded")
    for part in ("runs/a/metrics.jsonl", "6,000 images/s", "2 nodes", "25%"):
        assert part in need.source


def test_a_claim_is_divided_over_the_hosts() -> None:
    need = claimed_need(1_050_000.0, 256, "1,024 TPU v2")
    assert (need.per_second, need.basis) == (pytest.approx(4101.6, abs=0.1), "claim")
    for part in ("1,050,000 images/s", "1,024 TPU v2", "256 hosts", "launch.nodes"):
        assert part in need.source


@pytest.mark.parametrize(
    ("per_second", "per_core", "needed", "ratio", "missing", "cores", "printed"),
    [
        (3600.0, 1800.0, 2000.0, 1.8, 0.0, 1.11, ("3,600", "1,800", "1.80", "1.1 ")),
        (1800.0, 900.0, 3000.0, 0.6, 1200.0, 3.33, ("0.60", "1,200", "3.3 ")),
        (900.0, 900.0, 1500.0, 0.6, 600.0, 1.67, ("600", "1.7 ")),
        (900.0, 450.0, 1.5, 600.0, 0.0, 0.0033, ("600 ", "0.1 ")),
    ],
)
def test_headroom(
    per_second: float,
    per_core: float,
    needed: float,
    ratio: float,
    missing: float,
    cores: float,
    printed: tuple[str, ...],
) -> None:
    headroom = Headroom(per_second, per_core, needed, 2)
    assert (headroom.ratio, headroom.missing) == (pytest.approx(ratio), missing)
    assert headroom.cores_needed == pytest.approx(cores, rel=0.02)
    for number in printed:
        assert number in str(headroom)


def test_the_expected_rate_of_a_core_meets_the_measured_ones() -> None:
    for (loader, has_index), points in CORE_RATES.items():
        for kilobytes, rate in points:
            assert expected_core_rate(kilobytes, loader, has_index=has_index) == pytest.approx(rate)
    rates = [expected_core_rate(size, "native", has_index=False) for size in (0.1, 5.0, 30.0, 300.0)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1 / (1 / 960 + 189.9 * (1 / 960 - 1 / 4145) / 99.7))
    assert expected_core_rate(20.0, "reference", has_index=True) == expected_core_rate(
        20.0, "reference", has_index=False
    )


REMEDIES = ("cores", "input.workers", "native extension", "decode index", "decoded_cache_bytes", "data.resize_short")


@pytest.mark.parametrize("remedy", REMEDIES)
def test_the_plan_the_alert_and_its_runbook_name_the_same_remedies(remedy: str) -> None:
    alert = next(alert for alert in ALERT_RULES if alert.name == "PodscaleDataStarved")
    runbook = (ROOT / "docs/runbooks/PodscaleDataStarved.md").read_text(encoding="utf-8")
    for text in (remedies(has_index=False, has_extension=False), alert.description, runbook):
        assert remedy in text.replace("Cores", "cores")
    for text in (alert.description, runbook):
        assert "`podscale bench input RUN`" in text


def test_remedies_that_are_there_are_not_named() -> None:
    text = remedies(has_index=True, has_extension=True)
    assert {"native extension", "decode index"} == {remedy for remedy in REMEDIES if remedy not in text}
