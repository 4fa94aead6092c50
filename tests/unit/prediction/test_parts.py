"""Parts of a prediction: ranges, identity, what is predicted again, and what a merge refuses."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from podscale.cli import main
from podscale.errors import ABSENT
from podscale.export.export_model import export_model
from podscale.export.export_options import ExportOptions
from podscale.prediction import parts
from podscale.prediction.image_inputs import ImageItem
from podscale.prediction.merge_parts import merge_parts
from podscale.prediction.parts import Part, PartManifest, parse_part, predict_part
from podscale.prediction.predict import predict
from podscale.prediction.predictor import PredictedItem, PredictOptions, Predictor
from podscale.prediction.writers import row_of
from podscale.util.files import file_lock, file_sha256
from podscale.version import VERSION
from tests.support.outcomes import assert_error
from tests.support.prediction import photograph, write_photographs
from tests.support.refusals import refused

BATCH = 2


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_photographs(folder, 9)
    return folder


def predict_parts(
    run: Path,
    images: Sequence[str | Path],
    folder: Path,
    count: int,
    *,
    lines: Sequence[str] = (),
    limit: int | None = None,
) -> list[PartManifest]:
    options = PredictOptions(batch=BATCH, limit=limit)
    folder.mkdir(exist_ok=True)
    made = []
    for index in range(count):
        predictor = Predictor.open(run, [str(image) for image in images], options, parts.SpooledLines(lines))
        made.append(predict_part(predictor, Part(index, count), folder)[0])
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("total", [0, 1, 15, 16, 17, 100])
@pytest.mark.parametrize("batch", [1, 4, 32])
def test_ranges_are_whole_batches_and_cover_every_image_once(total: int, batch: int, count: int) -> None:
    ranges = [Part(index, count).images(total, batch) for index in range(count)]
    assert [number for one in ranges for number in one] == list(range(total))
    assert all(one.start % batch == 0 for one in ranges)
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 2 * batch - 1


def test_a_part_is_index_and_count() -> None:
    assert parse_part("3/4") == Part(3, 4)
    assert parse_part("0/1").name == "part-00000-of-00001"


@pytest.mark.parametrize("text", ["", "3", "4/4", "-1/4", "0/0", "1/2/3", "a/b", "0/100000", "²/4", " 0/4"])
def test_other_texts_are_refused(text: str) -> None:
    with refused("0/4, 1/4", field="--part", got=text):
        parse_part(text)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_merged_parts_are_the_rows_of_one_prediction(model_run: Path, photos: Path, tmp_path: Path, count: int) -> None:
    """Eight parts of five batches: some parts are empty."""
    manifests = predict_parts(model_run, [photos, photos], tmp_path / "parts", count)
    assert sum(one.rows for one in manifests) == 18
    counts = merge_parts(tmp_path / "parts", tmp_path / "rows.jsonl")
    names = [json.loads(line)["image"] for line in (tmp_path / "rows.jsonl").open()]
    assert names == [row.image for row in predict(model_run, [str(photos)] * 2, PredictOptions(batch=BATCH))]
    assert (counts.images, counts.failures, counts.parts) == (18, 0, count)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_merged_files_are_to_the_bit_those_of_one_prediction(
    model_run: Path, photos: Path, tmp_path: Path, suffix: str
) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    predict_parts(model_run, [photos], tmp_path / "parts", 3)
    one, merged = tmp_path / f"one.{suffix}", tmp_path / f"merged.{suffix}"
    assert main(["predict", str(model_run), str(photos), "--batch", str(BATCH), "--out", str(one)]) == 0
    assert main(["merge-predictions", str(tmp_path / "parts"), "--out", str(merged)]) == 0
    assert one.read_bytes() == merged.read_bytes()


def test_a_list_on_standard_input_and_a_limit_have_parts(model_run: Path, photos: Path, tmp_path: Path) -> None:
    lines = [f"{path}\n" for path in sorted(photos.rglob("*.jpg"))]
    predict_parts(model_run, ["-"], tmp_path / "parts", 2, lines=lines, limit=5)
    merge_parts(tmp_path / "parts", tmp_path / "rows.csv")
    rows = (tmp_path / "rows.csv").read_text().splitlines()[1:]
    assert [row.partition(",")[0] + "\n" for row in rows] == lines[:5]


def test_rows_that_were_damaged_or_lost_are_predicted_again(model_run: Path, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    first, second = predict_parts(model_run, [photos], folder, 2)
    rows = parts.rows_path(folder, Part(1, 2))
    good = rows.read_bytes()
    for damaged in (good[:-10], good.replace(b"ant", b"bee"), b"", b"no JSON\n", b"[1]\n"):
        rows.write_bytes(damaged)
        with refused(field=rows):
            merge_parts(folder, tmp_path / "rows.jsonl")
        assert not (tmp_path / "rows.jsonl").exists()
        assert not list(tmp_path.glob(".rows*"))
        assert predict_parts(model_run, [photos], folder, 2) == [first, second]
        assert rows.read_bytes() == good
    rows.unlink()
    with refused(field=rows):
        merge_parts(folder, tmp_path / "rows.jsonl")


def test_temporary_files_of_killed_processes_are_deleted(model_run: Path, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    rows = parts.rows_path(folder, Part(0, 2)).name
    left, living, other = (
        folder / f".{name}.tmp" for name in (f"{rows}.a", f"{rows}.b", "part-00001-of-00002.jsonl.a")
    )
    left.touch()
    other.touch()
    with file_lock(living):
        predict_part(Predictor.open(model_run, [str(photos)], PredictOptions(batch=BATCH)), Part(0, 2), folder)
        assert set(folder.glob(".*")) == {living, other}


def test_a_part_that_is_predicted_holds_the_lock_of_its_file(
    model_run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process of the part, which starts before the first one ends, leaves its file."""
    folder, second = tmp_path / "parts", Predictor.open(model_run, [str(photos)], PredictOptions(batch=BATCH))
    folder.mkdir()
    predict_items, found = parts.predict_items, list[PartManifest]()

    def interrupted(predictor: Predictor, items: Iterator[ImageItem]) -> Iterator[PredictedItem]:
        monkeypatch.setattr(parts, "predict_items", predict_items)
        found.append(predict_part(second, Part(0, 1), folder)[0])
        yield from predict_items(predictor, items)

    monkeypatch.setattr(parts, "predict_items", interrupted)
    (manifest,) = predict_parts(model_run, [photos], folder, 1)
    assert found == [manifest]
    assert not list(folder.glob(".*"))


def test_a_part_of_another_prediction_is_refused(model_run: Path, photos: Path, tmp_path: Path) -> None:
    folder, options = tmp_path / "parts", PredictOptions(batch=BATCH)
    predict_parts(model_run, [photos], folder, 2)
    images = tmp_path / "images"
    shutil.copytree(photos, images)
    model = tmp_path / "model"
    shutil.copytree(model_run, model)
    weights = model / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    (images / "a" / "new.jpg").write_bytes(photograph(99))
    for run, place, changed, names in (
        (model, photos, options, "weights_sha256"),
        (model_run, images, options, "images, list_sha256"),
        (model_run, photos, PredictOptions(batch=3), "batch"),
        (model_run, photos, PredictOptions(batch=BATCH, convert=True, top=2), "convert, top"),
        (model_run, photos, PredictOptions(batch=BATCH, limit=4), "images, list_sha256"),
    ):
        with refused(f": {names} ", field=folder, got="part-00000-of-00002"):
            predict_part(Predictor.open(run, [str(place)], changed), Part(0, 2), folder)


def test_parts_of_an_exported_file_are_of_this_file(model_run: Path, photos: Path, tmp_path: Path) -> None:
    """Two files of the same weights may have other last digits."""
    files = [tmp_path / name for name in ("logits.torchscript", "probabilities.torchscript")]
    for file in files:
        options = ExportOptions(format="torchscript", out=file, images=[str(photos)], preprocessing=file == files[1])
        export_model(model_run, options)
    manifests = predict_parts(files[0], [photos], tmp_path / "parts", 2)
    merge_parts(tmp_path / "parts", tmp_path / "rows.jsonl")
    rows = [json.loads(line)["probabilities"] for line in (tmp_path / "rows.jsonl").open()]
    expected = [row_of(row)["probabilities"] for row in predict(files[0], [str(photos)], PredictOptions(batch=BATCH))]
    assert rows == expected
    assert manifests[0].identity["exported_sha256"] == file_sha256(files[0])
    assert manifests[0].identity["weights_sha256"] == file_sha256(model_run / "model" / "model.safetensors")
    for other in (files[1], model_run):
        with refused("exported_sha256", field=tmp_path / "parts", got="part-00000-of-00002"):
            predict_parts(other, [photos], tmp_path / "parts", 2)


def test_a_merge_names_the_parts_of_another_prediction(model_run: Path, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    predict_parts(model_run, [photos], folder, 4)
    other = tmp_path / "other"
    other.mkdir()
    predictor = Predictor.open(model_run, [str(photos)], PredictOptions(batch=3))
    predict_part(predictor, Part(2, 4), other)
    for path in other.iterdir():
        shutil.copy(path, folder)
    with refused(": batch ", field=folder / "part-00002-of-00004.json"):
        merge_parts(folder, tmp_path / "rows.jsonl")


def test_a_merge_refuses_folders_without_one_complete_prediction(model_run: Path, photos: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "parts", tmp_path / "rows.jsonl"
    folder.mkdir()
    with refused("podscale predict --part", field=folder, got=ABSENT):
        merge_parts(folder, out)
    predict_parts(model_run, [photos], folder, 4)
    for index in (1, 3):
        parts.manifest_path(folder, Part(index, 4)).unlink()
    with refused("2 of 4", field=folder, got="part-00001-of-00004, part-00003-of-00004"):
        merge_parts(folder, out)
    predict_parts(model_run, [photos], folder, 2)
    with refused(field=folder, got="2 and 4"):
        merge_parts(folder, out)
    shutil.rmtree(folder)
    predict_parts(model_run, [photos], folder, 1)
    manifest = parts.manifest_path(folder, Part(0, 1))
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with refused(field=manifest, got=VERSION):
        merge_parts(folder, out)
    manifest.write_text("{}")
    with refused(field=manifest, got=ABSENT):
        merge_parts(folder, out)


def test_rows_that_cannot_be_read_are_no_error_of_the_merged_file(tmp_path: Path) -> None:
    folder, part = tmp_path / "parts", Part(0, 1)
    parts.rows_path(folder, part).mkdir(parents=True)
    manifest = PartManifest({"images": 1, "top": 1, "parts": 1}, 0, 1, "")
    parts.manifest_path(folder, part).write_text(json.dumps(vars(manifest)))
    (folder / f"{part.name} (copy).json").touch()
    with refused(field=parts.rows_path(folder, part), got=ABSENT):
        merge_parts(folder, tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("arguments", "field", "got"),
    [
        (["--part", "0/2"], "--out", ""),
        (["--part", "2/2", "--out", "parts"], "--part", "2/2"),
        (["--part", "0/2", "--out", "parts", "--html", "x.html"], "--html", "x.html"),
        (["--part", "0/2", "--out", "file/parts"], "--out", "file/parts"),
    ],
)
def test_bad_input_starts_nothing(
    model_run: Path,
    photos: Path,
    tmp_path: Path,
    arguments: list[str],
    field: str,
    got: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    code = main(["predict", str(model_run), str(photos), *arguments])
    assert_error(code, capsys.readouterr().err, got, field=field)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
