"""Files of predictions: what is written is what other readers read, whole or not at all."""

import csv
import json
from pathlib import Path

import pytest

from podscale.errors import InputError
from podscale.prediction.image_inputs import Failure
from podscale.prediction.predictor import Prediction
from podscale.prediction.writers import check_directory, check_output, open_writer, row_of

ROWS = [
    Prediction('a,b "c"\n.jpg', "bee", ("bee", "ant"), (0.75, 1 / 3), 1.5),
    Prediction("\\xff.jpg", None, failure=Failure("corrupt", "cut, at 3")),
]


def written(path: Path) -> Path:
    check_output(path)
    with open_writer(path, 2) as writer:
        for row in ROWS:
            writer.write(row)
        assert not path.exists(), "a reader sees no part of it"
    return path


def test_json_lines(tmp_path: Path) -> None:
    lines = written(tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [row_of(row) for row in ROWS]
    first, second = map(json.loads, lines)
    assert first["image"] == ROWS[0].image
    assert first["probabilities"] == [0.75, 0.333333]
    assert first["temperature"] == 1.5
    assert (second["reason"], second["classes"], second["temperature"]) == ("corrupt", [], None)


def test_csv(tmp_path: Path) -> None:
    with written(tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert first["image"] == ROWS[0].image
    assert (first["label"], first["class_1"], first["class_2"], first["probability_2"]) == (
        "bee",
        "bee",
        "ant",
        "0.333333",
    )
    assert (second["class_1"], second["reason"], second["detail"]) == ("", "corrupt", "cut, at 3")


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install pyarrow")
    table = parquet.read_table(written(tmp_path / "out.parquet"))
    assert table.to_pylist() == [row_of(row) for row in ROWS]


def test_nothing_appears_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(AttributeError), open_writer(tmp_path / "out.jsonl", 2) as writer:
        [writer.write(row) for row in (ROWS[0], None)]  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_file_do_not_mix_their_rows(tmp_path: Path) -> None:
    """Two pods may join the same parts at once, and the first process of every container has the same id."""
    path = tmp_path / "out.jsonl"
    with open_writer(path, 2) as one:
        one.write(ROWS[0])
        with open_writer(path, 2) as other:
            other.write(ROWS[1])
        assert [json.loads(line) for line in path.open()] == [row_of(ROWS[1])]
        one.write(ROWS[1])
    assert [json.loads(line) for line in path.open()] == [row_of(row) for row in ROWS]
    assert list(tmp_path.iterdir()) == [path]


def test_unusable_outputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podscale.prediction.writers.find_spec", lambda name: None)
    for path in (tmp_path / "out.txt", tmp_path / "no" / "out.csv", tmp_path / "out.parquet"):
        with pytest.raises(InputError) as refusal:
            check_output(path)
        assert (refusal.value.field, refusal.value.got) == ("--out", str(path))
    with pytest.raises(InputError) as refusal:
        check_directory(tmp_path, "--html")
    assert refusal.value.field == "--html"
