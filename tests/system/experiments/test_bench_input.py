"""`podscale bench input`: from folders, archives and shard sets to a report, and bad input."""

import json
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from podscale.bench.images import copy_without_labels
from podscale.cli import bench_input, main
from podscale.cli.bench_input import input_rates
from podscale.data.loaders import build_loader
from podscale.data.loaders.build_loader import unavailable_reason
from podscale.data.sources import SourceMissing
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
    assert copy_without_labels(str(photographs), target) == 12
    copies = sorted(str(path.relative_to(target)) for path in target.rglob("*.*"))
    assert sum(path.startswith("train/") for path in copies) == 12
    assert copies[-2:] == ["val/class-0/0000000.jpg", "val/class-1/0000001.jpg"]
    original = next(photographs.glob("0.jpg")).read_bytes()
    assert (target / "train" / "class-0" / "0000000.jpg").read_bytes() == original


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
