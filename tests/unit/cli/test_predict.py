"""`podscale predict`: rows on standard output or in a file, and the exit code."""

import csv
import io
import json
from pathlib import Path

import pytest

from podscale.cli import main
from tests.support.outcomes import assert_error
from tests.support.prediction import photograph, write_model_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = write_model_run(tmp_path_factory.mktemp("run"))
    return Path(config.run.workspace) / "runs" / config.run.id


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(photograph(number))
    return tmp_path


def test_rows_go_to_standard_output_or_to_a_file(
    run: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(run), str(photos), "--top", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["image"] for row in rows] == [str(photos / f"{number}.jpg") for number in range(3)]
    out = tmp_path_factory.mktemp("out")
    assert main(["predict", str(run), str(photos), "--out", str(out / "o.csv"), "--html", str(out / "o.html")]) == 0
    assert capsys.readouterr().out == ""
    table = list(csv.DictReader((out / "o.csv").open(newline="")))
    assert [row["class_1"] for row in table] == [row["classes"][0] for row in rows]
    assert (out / "o.html").read_text().count("<img") == 3


def test_a_list_on_standard_input(
    run: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{photos}/2.jpg\n{photos}/0.jpg\n"))
    assert main(["predict", str(run), "-", "--limit", "1"]) == 0
    assert [json.loads(line)["image"] for line in capsys.readouterr().out.splitlines()] == [f"{photos}/2.jpg"]


def test_an_image_without_a_prediction_is_in_the_exit_code(
    run: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "1.jpg").write_bytes(b"")
    assert main(["predict", str(run), str(photos)]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["reason"] for row in rows] == [None, "empty", None]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [(["--out", "x.txt"], "--out"), (["--html", "no/such/folder/x.html"], "--html")],
)
def test_an_unusable_output_is_refused_before_the_start(
    arguments: list[str], field: str, run: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["predict", str(run), str(photos), *arguments])
    assert_error(code, capsys.readouterr().err, field=field)
