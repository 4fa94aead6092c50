"""`podscale bench input`: from folders, archives, shard sets and run documents to a report, and bad input."""

import json
import re
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from podscale import models
from podscale.bench.images import CopiedImages, copy_from_source, copy_without_labels
from podscale.cli import bench_input, main
from podscale.cli.bench_input import input_rates
from podscale.cli.input_need import describe_input, run_need
from podscale.config import RunConfig, load
from podscale.config.data import DataSection
from podscale.data.loaders import build_loader
from podscale.data.loaders.build_loader import unavailable_reason
from podscale.data.sources import SourceMissing
from podscale.pipelines import presets
from podscale.runs import RunDirectory
from podscale.runs.stage_outcomes import prepare_run_directory
from podscale.telemetry.events import EventLog
from podscale.util import host_info
from tests.support.loading import ON_CPU
from tests.support.refusals import refused
from tests.support.shard_set import encode_image, smooth_pixels

QUICK: dict[str, Any] = {"seconds": 0.1, "rounds": 2, "image_size": 16, "batch": 4, "loaders": "reference"}


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Folder of 12 JPEGs, two of them in a folder of their own, and a file that is no image."""
    folder = tmp_path / "photographs"
    (folder / "more").mkdir(parents=True)
    for number in range(12):
        name = f"more/{number}.JPEG" if number > 9 else f"{number}.jpg"
        (folder / name).write_bytes(encode_image(smooth_pixels(number, 30 + number, 40)))
    (folder / "notes.txt").write_text("no image")
    return folder


def test_a_flat_folder_is_measured_and_nothing_is_left(photographs: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    scratch, out = tmp_path / "scratch", tmp_path / "new" / "out"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(host_info, "gpu_names", lambda: [])
    options = ["--source", str(photographs), "--loaders", f"{ON_CPU},nvjpeg", "--workers", "1,2", "--seconds", "0.1"]
    sizes = ["--rounds", "2", "--image-size", "16", "--batch", "4", "--device", "cpu", "--need", "100"]
    assert main(["bench", "input", *options, *sizes, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert list(scratch.iterdir()) == []
    text = (out / "input-cpu.md").read_text(encoding="utf-8")
    assert text == printed.out
    assert str(tmp_path) not in text
    values = json.loads((out / "input-cpu.json").read_text(encoding="utf-8"))
    assert (values["images"], values["batch"], values["image_size"]) == (12, 4, 16)
    assert [(row["loader"], row["workers"]) for row in values["rows"]] == [(ON_CPU, 1), (ON_CPU, 2), ("nvjpeg", None)]
    first = values["rows"][0]
    assert len(first["rates"]) == 2
    assert first["cores_needed"] == pytest.approx(100 / first["images_per_cpu_second"])
    assert "GPU" in values["rows"][2]["reason"]
    assert f"| {ON_CPU} | 2 | " in text
    assert f"{ON_CPU}, 2 workers: " in printed.err


def test_archives_and_shard_sets(photographs: Path, tmp_path: Path, make_shard_set, capsys) -> None:
    archive = tmp_path / "photographs.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(photographs, arcname="images")
    input_rates(source=str(archive), as_json=True, **QUICK)
    assert json.loads(capsys.readouterr().out)["images"] == 12
    input_rates(shard_set=str(make_shard_set()), as_json=True, **QUICK)
    assert json.loads(capsys.readouterr().out)["images"] == 48
    input_rates(source="digits", as_json=True, **QUICK | {"batch": None})
    values = json.loads(capsys.readouterr().out)
    assert values["batch"] == 256
    assert values["images"] > 1000


def test_the_options_of_a_document_count(photographs: Path, tmp_path: Path, capsys) -> None:
    document = tmp_path / "run.yaml"
    document.write_text(
        "model: {stem: small}\ninput: {image_size: 20, interpolation: bicubic}\ndata: {source: elsewhere}\n"
    )
    options = {**QUICK, "image_size": None}
    input_rates(str(document), ["input.prefetch=1"], source=str(photographs), as_json=True, **options)
    values = json.loads(capsys.readouterr().out)
    assert (values["image_size"], values["interpolation"]) == (20, "bicubic")


def test_images_become_training_images_without_their_folders(photographs: Path, tmp_path: Path) -> None:
    target = tmp_path / "copies"
    assert copy_without_labels(str(photographs), target) == CopiedImages(12, 12)
    copies = sorted(str(path.relative_to(target)) for path in target.rglob("*.*"))
    assert sum(path.startswith("train/") for path in copies) == 12
    assert copies[-2:] == ["val/class-0/0000000.jpg", "val/class-1/0000001.jpg"]
    original = next(photographs.glob("0.jpg")).read_bytes()
    assert (target / "train" / "class-0" / "0000000.jpg").read_bytes() == original
    assert copy_without_labels(str(photographs), tmp_path / "few", 5) == CopiedImages(5, None)
    assert len(list((tmp_path / "few" / "train").rglob("*.*"))) == 5


@pytest.fixture
def class_folders(tmp_path: Path) -> Path:
    """Source with two classes of 10 photographs in train/, and one of each class in val/."""
    for split, count in (("train", 10), ("val", 1)):
        for label in ("cat", "dog"):
            folder = tmp_path / "classes" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = smooth_pixels(number + 50 * (label == "dog"), 60 + number, 70)
                (folder / f"{number}.jpg").write_bytes(encode_image(pixels))
    return tmp_path / "classes"


def test_training_images_of_a_document_are_copied_evenly_spaced(class_folders: Path, tmp_path: Path) -> None:
    def copy(name: str, limit: int | None, **options: Any) -> CopiedImages:
        return copy_from_source(DataSection(source=str(class_folders), **options), tmp_path / name, limit)

    assert copy("all", None) == CopiedImages(20, 20)
    assert copy("some", 8) == CopiedImages(8, 20)
    originals = {path.read_bytes(): path.parent.name for path in (class_folders / "train").rglob("*.jpg")}
    copies = [originals[path.read_bytes()] for path in (tmp_path / "some" / "train").rglob("*.jpg")]
    assert sorted(copies) == ["cat"] * 4 + ["dog"] * 4
    assert copy("fewer", 8, images_per_class=3, holdout_fraction=0.5) == CopiedImages(8, 3)
    both = ("cat", "dog")
    assert copy("named", 8, only_classes=both) == CopiedImages(8, 20)
    digits = copy_from_source(DataSection(), tmp_path / "digits", 10)
    assert digits == CopiedImages(10, round(1797 * 0.8))


def write_document(tmp_path: Path, source: Path, **data: Any) -> Path:
    document = tmp_path / "shapes.yaml"
    values = {
        "run": {"id": "shapes", "workspace": str(tmp_path / "work")},
        "data": {"source": str(source), **data},
        "input": {"image_size": 32},
        "model": {"name": "resnet18", "stem": "small", "width": 8},
        "train": {"global_batch": 8},
    }
    document.write_text(json.dumps(values))
    return document


def test_a_document_is_measured_with_its_own_images_and_its_own_need(
    class_folders: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    """As a user types it: no other option names images. Nothing is left of the packed ones."""
    monkeypatch.setattr(host_info, "gpu_names", lambda: [])
    monkeypatch.setattr(host_info, "cpu_count", lambda: 2)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    document = write_document(tmp_path, class_folders)
    assert main(["bench", "input", str(document), "--seconds", "0.2", "--rounds", "1", "--loaders", ON_CPU]) == 0
    text = capsys.readouterr().out
    assert list(scratch.iterdir()) == []
    assert not (tmp_path / "work").exists()
    assert re.search(r"^20 images .*data\.source", text, re.MULTILINE)
    for part in ("resnet18 at 32 px (0.0", "2 CPU cores", "17 GFLOP/s", f"- {ON_CPU}, 2 workers ", "headroom"):
        assert part in text
    for part in ("input.workers=1,", "| `data.resize_short=37` |", " memory for 20 images"):
        assert part in text
    assert str(tmp_path) not in text


def test_the_shard_set_of_the_run_comes_before_its_source(class_folders: Path, tmp_path: Path, capsys) -> None:
    document = write_document(tmp_path, class_folders, decode_index=None)
    assert main(["shard", str(document)]) == 0
    shutil.rmtree(class_folders)
    capsys.readouterr()
    options = {**QUICK, "loaders": ON_CPU, "image_size": None}
    input_rates(str(document), need=50.0, as_json=True, **options)
    values = json.loads(capsys.readouterr().out)
    assert (values["images"], values["origin"]) == (20, "of the shard set of this run")
    assert (values["needed_rate"]["per_second"], values["needed_rate"]["basis"]) == (50.0, "given")
    assert values["run"] == {"loader": ON_CPU, "workers": 1, "processes": 1}
    changes = [row["change"] for row in values["levers"]["rows"]]
    assert changes[0] == "none"
    assert changes[-1] == "smaller images"
    assert ("decode index" in changes) == (ON_CPU == "native")
    assert all(row["images_per_cpu_second"] > 0 for row in values["levers"]["rows"])
    input_rates(str(document), levers=False, as_json=True, **options)
    assert json.loads(capsys.readouterr().out)["levers"] is None
    with refused(field="data.source", kind=SourceMissing):
        input_rates(str(document), ["data.seed=3"], **options)


@pytest.fixture
def recorded_run(class_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Document of an earlier run on two nodes like this machine: 800 images/s, a fifth of the step time waiting."""
    monkeypatch.setattr(host_info, "gpu_names", lambda: [])
    config = load(write_document(tmp_path, class_folders), [])
    run = prepare_run_directory(config)
    environment = {"gpus": [], "cpu": host_info.cpu_name(), "cores": host_info.cpu_count(), "nodes": 2}
    run.environment.write_text(json.dumps(environment))
    phases = {"data_wait": 2.0, "forward_backward": 8.0, "evaluation": 100.0}
    with EventLog(run.metrics) as log:
        log.event("start", step=0, global_batch=8, total_steps=20)
        for step in (10, 20):
            log.step(step, epoch=1.0, loss=1.0, learning_rate=0.1, images_per_second=800.0, phases=phases)
    return config


def test_the_need_is_that_of_an_earlier_run_of_the_document(recorded_run: RunConfig, monkeypatch) -> None:
    need = run_need(recorded_run)
    assert (need.per_second, need.basis) == (pytest.approx(800 / 2 / 0.8), "recorded")
    for part in ("runs/shapes/metrics.jsonl", "800 images/s", "2 nodes", "20%"):
        assert part in need.source
    for part in ("500 images/s", need.source):
        assert part in describe_input(recorded_run)
    larger = recorded_run.model_copy(update={"input": recorded_run.input.model_copy(update={"image_size": 40})})
    assert run_need(larger).basis == "estimate", "another document"
    assert "resnet18 at 40 px" in run_need(larger).source
    monkeypatch.setattr(host_info, "cpu_count", lambda: 96)
    assert run_need(recorded_run).basis == "estimate", "recorded on another machine"


@pytest.mark.parametrize("environment", ["", "{", "[]", "{}", '{"nodes": null}'])
def test_a_damaged_record_gives_no_need(recorded_run: RunConfig, environment: str) -> None:
    path = RunDirectory.for_config(recorded_run).environment
    path.write_text(environment or path.read_text().replace('"nodes": 2', '"nodes": 0'))
    assert run_need(recorded_run).basis == "estimate"


def test_a_published_recipe_needs_its_claim_and_an_unknown_model_that_of_resnet50(monkeypatch) -> None:
    monkeypatch.setattr(host_info, "gpu_names", lambda: [])
    monkeypatch.setattr(host_info, "visible_gpus", lambda: 0)
    claim = run_need(load(presets.resolve_preset("kumar2019-32k"), []))
    assert (claim.per_second, claim.basis) == (pytest.approx(1298041 / 128), "claim")
    assert "1,298,041 images/s on TPU v3 pod" in claim.source
    hardware = run_need(load(presets.resolve_preset("mlperf-8xh100"), []))
    assert hardware.per_second == pytest.approx(4 * 7000, rel=0.01)
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    unknown = run_need(load(None, ["model.name=torchvision:no_such_model"]))
    assert (unknown.per_second, unknown.basis) == (7000, "published")
    assert "torchvision:no_such_model" in unknown.source


def test_the_plan_compares_the_need_with_the_threads(class_folders: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(host_info, "gpu_names", lambda: [])
    document = write_document(tmp_path, class_folders)
    assert main(["run", str(document), "--dry-run"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("input ")]
    assert "input.workers" not in row, "the rate of its cores is not known yet"
    assert "`podscale bench input RUN`" in row
    assert main(["shard", str(document)]) == 0
    options = ["--set", "launch.hardware=nvidia-h100-80gb x8", "--set", "launch.processes=1"]
    assert main(["run", str(document), "--dry-run", *options]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("input ")]
    for part in ("8 H100", "launch.hardware", "input.workers=1 "):
        assert part in row
    for remedy in ("cores", "input.workers", "input.decoded_cache_bytes", "data.resize_short"):
        assert remedy in row.partition("input.workers=1 ")[2]
    assert ("--decode-index" in row) == (ON_CPU != "native"), "the extension packs an index"
    assert "`podscale bench input RUN`" in row
    (index,) = (tmp_path / "work").rglob("train/index")
    index.write_bytes(b"damaged")
    assert "input.workers" not in describe_input(load(document, []))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "--source, --shard-set"),
        ({"source": "digits", "shard_set": "x"}, "--source, --shard-set"),
        ({"source": "digits", "out": Path(__file__) / "out"}, "--out"),
        ({"source": "digits", "loaders": "reference,fast"}, "--loaders"),
        ({"source": "digits", "loaders": ""}, "--loaders"),
        ({"source": "digits", "loaders": "nvjpeg"}, "--loaders"),
        ({"source": "digits", "workers": "2,few"}, "--workers"),
        ({"source": "digits", "workers": "0"}, "--workers"),
        ({"source": "digits", "batch": 10**6}, "--batch"),
        ({"source": "digits", "device": "warp"}, "--device"),
        ({"source": "digits", "device": "meta"}, "--device"),
        ({"source": "digits", "device": "cuda:9"}, "--device"),
    ],
)
def test_bad_input_is_one_error(options: dict[str, Any], field: str) -> None:
    with refused(field=field):
        input_rates(**{**QUICK, "device": "cpu", **options})


def test_a_source_without_images_is_refused(photographs: Path) -> None:
    with refused(field="data.source", kind=SourceMissing):
        input_rates(source="/no/such/folder", **QUICK)
    for path in photographs.glob("*.jpg"):
        path.unlink()
    (photographs / "more" / "10.JPEG").unlink()
    with refused("1 images", field="--source", got=str(photographs)):
        input_rates(source=str(photographs), **QUICK)
    shutil.rmtree(photographs)
    photographs.write_bytes(b"no archive")
    with refused(field="--source"):
        input_rates(source=str(photographs), **QUICK)


def test_loaders_that_are_not_here_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unavailable_reason("reference", "cpu") == ""
    assert unavailable_reason("nvjpeg", "cuda:9") != ""
    monkeypatch.setattr(build_loader, "_is_nvjpeg_available", lambda device: True)
    monkeypatch.setattr(build_loader, "is_dali_installed", lambda: False)
    monkeypatch.setattr(build_loader.native, "_native", None)
    assert unavailable_reason("nvjpeg", "cuda:9") == ""
    assert "podscale[gpu]" in unavailable_reason("dali", "cpu")
    assert "not installed" in unavailable_reason("native", "cpu")
    rows = bench_input._input_rows("native,dali,reference", None, "cpu")
    assert [bool(row.reason) for row in rows] == [True, True, False]
    assert rows[2].workers == host_info.cpu_count()
