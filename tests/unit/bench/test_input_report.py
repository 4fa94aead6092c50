"""Report of the input benchmark: arithmetic, conditions, and one page as a whole."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from podscale.bench.input_need import NeededRate
from podscale.bench.input_rates import InputRow, InputSettings, Rate
from podscale.bench.input_report import InputReport, RunInput, describe
from podscale.config import InputSection
from podscale.data.shard_set import ShardSet
from tests.support.golden import assert_golden
from tests.support.shard_set import Sample, encode_image, smooth_pixels

PAGE = Path(__file__).with_suffix(".txt")


def report(need: float, rows: Sequence[InputRow], run: RunInput | None = None, **changes: object) -> InputReport:
    conditions = {
        "command": "podscale bench input", "date": "2026-11-28", "cores": 16, "cpu": "a CPU", "gpus": ["NVIDIA H100"],
        "load_average": 0.1, "versions": {"numpy": "2"}, "images": 500, "kilobytes": 110.0, "megapixels": 0.2,
        "image_size": 224, "interpolation": "bilinear", "batch": 256, "seconds": 1.0, "rounds": 3, "device": "cpu",
        "decode_index_hint": "", "origin": "of a source",
    } | changes  # fmt: skip
    return InputReport(conditions, NeededRate(need, "a reason"), rows, run)


def page(found: InputReport) -> str:
    return "\n".join([*found.lines(), ""])


def test_the_report_compares_rates_with_the_need() -> None:
    rates = (Rate(1000.0, 12000.0), Rate(1400.0, 14000.0), Rate(1200.0, 10000.0))
    rows = [InputRow("native", 16, rates), InputRow("native", 1, (Rate(1300.0, 1250.0),))]
    found = report(7200.0, [*rows, InputRow("dali", None, reason="not | installed")], device="cuda:0")
    values = json.loads(json.dumps(found.values()))
    assert values["rows"][0]["cores_needed"] == pytest.approx(6.0)
    assert values["rows"][0]["rates"][1] == {"per_cpu_second": 1400.0, "per_second": 14000.0}
    assert values["rows"][0]["headroom"] == pytest.approx(12000 / 7200)
    assert values["rows"][0]["missing_images_per_second"] == 0
    assert values["rows"][1]["missing_images_per_second"] == pytest.approx(7200 - 1250)
    assert values["rows"][2]["reason"] == "not | installed"
    assert values["needed_rate"] == {"per_second": 7200.0, "source": "a reason", "basis": "given"}
    assert "cuda:0" in page(found)


def test_the_page_of_a_report() -> None:
    """Loaders that deliver enough, that do not, and that would if no other work took the time of the cores."""
    rows = [
        InputRow("native", 16, (Rate(1000.0, 15000.0), Rate(1010.0, 14500.0), Rate(990.0, 15500.0)), refused=3),
        InputRow("native", 1, (Rate(1300.0, 1250.0),)),
        InputRow("reference", 16, (Rate(1300.0, 4500.0),)),
        InputRow("nvjpeg", None, (Rate(20000.0, 24000.0),)),
        InputRow("dali", None, reason="not | installed"),
    ]
    assert_golden(PAGE, page(report(20000.0, rows, RunInput("native", 1, 4))))


def test_the_report_of_a_starved_run_has_what_it_lacks() -> None:
    native = InputRow("native", 16, (Rate(1000.0, 15000.0),))
    reference = InputRow("reference", 16, (Rate(300.0, 4500.0),))
    starved = report(20000.0, [native, reference], RunInput("native", 1, 4))
    own, other = starved.values()["rows"]
    assert (own["headroom"], own["missing_images_per_second"], own["cores_needed"]) == (0.75, 5000, 20)
    assert (other["headroom"], other["missing_images_per_second"]) == (0.225, 15500)
    assert "input.workers=4 " in page(starved)
    assert "input.workers" not in page(report(20000.0, [native, reference], RunInput("native", 4, 4)))
    assert "input.workers" not in page(report(20000.0, [native, reference]))


def test_the_report_names_the_remedies_of_this_host() -> None:
    reference = InputRow("reference", 16, (Rate(300.0, 4500.0),))
    no_extension = [InputRow("native", None, reason="not installed"), reference]
    assert "`podscale doctor`" in page(report(20000.0, no_extension))
    assert "`podscale doctor`" not in page(report(20000.0, [reference]))
    native = [InputRow("native", 16, (Rate(1000.0, 15000.0),))]
    hint = "podscale shard --decode-index"
    assert hint in page(report(20000.0, native, decode_index_hint=hint))
    assert hint not in page(report(20000.0, [reference], decode_index_hint=hint)), "only the extension uses an index"


def test_the_conditions_describe_the_images(make_shard_set: object, tmp_path: Path) -> None:
    samples = [Sample(encode_image(smooth_pixels(i, 40, 50)), i % 4) for i in range(8)]
    directory = make_shard_set({"train": samples, "validation": samples})  # type: ignore[operator]
    split = ShardSet.open(directory).split("train")
    found = describe("a command", split, InputSection(), InputSettings(batch=8, seconds=0.02, rounds=2), [], 0.5)
    assert found["images"] == 8
    assert found["kilobytes"] == pytest.approx(sum(len(sample.image) for sample in samples) / 8000)
    assert found["megapixels"] == pytest.approx(0.002)
    assert found["versions"]["numpy"] == np.__version__
    assert found["batch"] == 8
