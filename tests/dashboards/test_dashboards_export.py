"""`podscale dashboards export`: the packaged files with the runbooks' address."""

import json
from pathlib import Path

import pytest

from podscale.cli import main
from podscale.errors import ExitCode
from tests.support.helm import CHART
from tests.support.outcomes import assert_error


def test_the_files_are_those_of_the_chart_with_the_address_filled_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "folder"
    assert main(["dashboards", "export", str(folder), "--runbooks", "https://wiki.example/runbooks"]) == ExitCode.DONE
    committed = sorted((CHART / "dashboards").glob("*.json"))
    assert capsys.readouterr().out.split() == [str(folder / path.name) for path in committed]
    for path in committed:
        written = (folder / path.name).read_text(encoding="utf-8")
        assert written == path.read_text(encoding="utf-8").replace("@runbooks@", "https://wiki.example/runbooks/")
        assert json.loads(written)["links"][1]["url"] == "https://wiki.example/runbooks/"


def test_a_folder_that_cannot_be_and_an_address_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "folder"
    assert_error(main(["dashboards", "export", str(folder)]), capsys.readouterr().err, field=folder)
    code = main(["dashboards", "export", str(tmp_path), "--runbooks", 'a "page"'])
    assert_error(code, capsys.readouterr().err, 'a "page"', field="--runbooks")
    assert not list(tmp_path.glob("*.json"))
