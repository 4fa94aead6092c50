"""Predictions: one row an image, in order, with the probabilities of softmax in float64."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from podscale.config import RunConfig
from podscale.data import native
from podscale.errors import InputError
from podscale.prediction.image_inputs import iter_items
from podscale.prediction.model import open_model
from podscale.prediction.predict import predict
from podscale.prediction.predictor import NOT_FINITE, Prediction, PredictOptions, Predictor, top_classes
from podscale.prediction.preparation import CHUNKS_AHEAD
from podscale.runs.model_files import INFERENCE_OPTIONS, preprocessing_of
from tests.conftest import MakeShardSet
from tests.support.prediction import (
    CLASSES,
    DOCUMENT,
    assert_same_rows,
    odd_images,
    photograph,
    write_model_run,
    write_photo_folder,
    write_tar,
)
from tests.support.shard_set import Sample, encode_image, smooth_pixels


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of 23 photographs and all odd images, in folders a, b and odd."""
    return write_photo_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def rows(model_run: Path, photos: Path) -> list[Prediction]:
    return list(predict(model_run, [str(photos)]))


def test_every_image_has_one_row_in_order(rows: list[Prediction], photos: Path) -> None:
    names = sorted(str(path) for path in photos.rglob("*") if path.is_file())
    assert [row.image for row in rows] == names
    reasons = {row.image.rpartition("/")[2]: row.failure and row.failure.reason for row in rows[23:]}
    assert reasons == {name: reason for name, (_, reason, _) in odd_images().items()}
    assert len({row.classes for row in rows if row.classes}) > 1, "the model tells images apart"
    for row in rows:
        assert (len(row.classes), len(row.probabilities)) == ((0, 0) if row.failure else (5, 5))


@pytest.mark.parametrize("batch", [1, 7, 100])
def test_rows_do_not_depend_on_the_batch(batch: int, rows: list[Prediction], model_run: Path, photos: Path) -> None:
    assert_same_rows(list(predict(model_run, [str(photos)], PredictOptions(batch=batch))), rows)


def test_scores_do_not_depend_on_the_native_extension(
    rows: list[Prediction], model_run: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert list(predict(model_run, [str(photos)])) == rows


def test_several_inputs_a_limit_and_the_number_of_classes(
    rows: list[Prediction], model_run: Path, photos: Path
) -> None:
    inputs = [str(photos / "b"), str(photos / "a"), "-"]
    again = list(predict(model_run, inputs, PredictOptions(top=2, limit=24), lines=[f"{photos}/a/0000.jpg\n"] * 5))
    named = [*rows[11:23], *rows[:11], rows[0]]
    expected = [replace(row, classes=row.classes[:2], probabilities=row.probabilities[:2]) for row in named]
    assert_same_rows(again, expected)
    (most,) = predict(model_run, [str(photos)], PredictOptions(top=99, limit=1))
    assert sorted(most.classes) == CLASSES
    assert sum(most.probabilities) == pytest.approx(1)


def test_a_model_directory_elsewhere_predicts_the_same(
    rows: list[Prediction], model_run: Path, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_run / "model", tmp_path / "copy")
    assert_same_rows(list(predict(tmp_path / "copy", [str(photos)])), rows)


def test_options_of_the_evaluation_count_without_the_run(tmp_path: Path) -> None:
    """Every option that predictions depend on has another value than its default."""
    options = """
data: {policy: convert, resize_short: 77, quality: 66, max_pixels: 99999, max_bytes: 88888}
evaluate: {flip: true, image_size: 48, crop_fraction: 0.75}
train: {precision: bf16, channels_last: false, stem_compute: space_to_depth}
"""
    document = write_model_run(tmp_path, DOCUMENT.replace("stem: small, ", "") + options)
    shutil.copytree(tmp_path / "runs" / document.run.id / "model", tmp_path / "copy")
    config, default = open_model(tmp_path / "copy").config, RunConfig()
    for section, names in INFERENCE_OPTIONS.items():
        for name in names:
            value = getattr(getattr(config, section), name)
            assert value == getattr(getattr(document, section), name)
            assert value != getattr(getattr(default, section), name), name
    assert preprocessing_of(config) == preprocessing_of(document)
    description = json.loads((tmp_path / "copy" / "model.json").read_text())
    assert {section: set(values) for section, values in description["inference"].items()} == {
        "data": {"policy", "resize_short", "quality", "max_pixels", "max_bytes"},
        "evaluate": {"flip"},
        "train": {"precision", "channels_last", "stem_compute"},
    }
    del description["inference"]  # as an older version wrote it
    (tmp_path / "copy" / "model.json").write_text(json.dumps(description))
    older = open_model(tmp_path / "copy").config
    assert (older.evaluate.flip, older.train.precision) == (False, "fp32")


def test_probabilities_are_softmax_over_the_temperature() -> None:
    logits = np.random.default_rng(0).normal(0, 4, (6, 9)).astype(np.float32)
    log_probabilities = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    for temperature in (0.3, 1.0, 2.5):
        expected = np.exp(logits.astype(np.float64) / temperature)
        expected /= expected.sum(axis=1, keepdims=True)
        topk, probabilities = top_classes(log_probabilities, 4, temperature)
        np.testing.assert_array_equal(topk, np.argsort(-logits, axis=1)[:, :4])
        np.testing.assert_allclose(probabilities, -np.sort(-expected, axis=1)[:, :4], rtol=1e-5)


def test_equal_classes_come_by_index() -> None:
    assert top_classes(np.log(np.full((1, 4), 0.25, np.float32)), 3, 2.0)[0].tolist() == [[0, 1, 2]]


def test_a_model_that_diverged_gives_reasons(model_run: Path, photos: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model_run / "model", tmp_path / "model")
    arrays = load_file(tmp_path / "model" / "model.safetensors")
    arrays["fc.bias"][2] = np.nan
    save_file(arrays, tmp_path / "model" / "model.safetensors")
    found = list(predict(tmp_path, [str(photos / "a")]))
    assert {row.failure.reason for row in found if row.failure} == {NOT_FINITE}
    assert all(row.failure for row in found)


def test_missing_models_and_wrong_options_are_refused(model_run: Path, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        predict(tmp_path, [str(photos)])
    assert refusal.value.field == str(tmp_path)
    (tmp_path / "model.json").write_text("[]")
    with pytest.raises(InputError) as refusal:
        predict(tmp_path, [str(photos)])
    assert refusal.value.field == str(tmp_path / "model.json")
    for name in ("top", "batch", "limit", "processes"):
        with pytest.raises(InputError) as refusal:
            predict(model_run, [str(photos)], PredictOptions(**{name: 0}))
        assert refusal.value.field == f"--{name}"


@pytest.mark.parametrize(
    ("change", "field"), [({"format": "podscale-model-9"}, "model.json: format"), ({"classes": None}, "model.json")]
)
def test_a_model_of_another_version_is_refused(
    change: dict[str, object], field: str, model_run: Path, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_run / "model", tmp_path / "copy")
    path = tmp_path / "copy" / "model.json"
    description = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({name: value for name, value in description.items() if value is not None}))
    with pytest.raises(InputError) as refusal:
        predict(tmp_path / "copy", [str(photos)])
    assert refusal.value.field == str(tmp_path / "copy" / field)


def test_images_of_a_tar_are_converted_by_their_own_names(model_run: Path, tmp_path: Path) -> None:
    """A PNG with the name of a JPEG is converted, as `podscale shard` converts it."""
    content = encode_image(smooth_pixels(1, 40, 40), kind="PNG")
    (tmp_path / "x.jpg").write_bytes(content)
    (tmp_path / "x.png").write_bytes(content)
    write_tar(tmp_path / "x.tar", {"x.jpg": content})
    predictor = Predictor.open(model_run, [str(tmp_path)], PredictOptions(convert=True))
    with closing(predictor.open_decoder()) as decoder:
        jpg, png, member = map(decoder.prepare, iter_items(predictor.inputs))
    np.testing.assert_array_equal(member, jpg)
    assert (np.asarray(jpg) != np.asarray(png)).any()


def test_the_number_of_images_is_known_for_shard_sets_only(
    model_run: Path, photos: Path, make_shard_set: MakeShardSet
) -> None:
    shards = str(make_shard_set({"train": [Sample(photograph(0), 0)] * 3}, classes=["ant"]))
    for inputs, limit, expected in (
        ([str(photos)], None, 0),
        ([shards, str(photos)], None, 0),
        ([shards, shards], None, 6),
        ([shards, shards], 4, 4),
        ([shards, shards], 7, 6),
    ):
        assert Predictor.open(model_run, inputs, PredictOptions(limit=limit)).count == expected


def test_images_are_read_only_a_few_batches_ahead(model_run: Path, photos: Path) -> None:
    read = []

    def lines() -> Iterator[str]:
        for number in range(100):
            read.append(number)
            yield f"{photos}/a/0000.jpg\n"

    rows = predict(model_run, ["-"], PredictOptions(batch=2), lines=lines())
    next(rows)
    assert len(read) <= 2 * (CHUNKS_AHEAD + 1)
