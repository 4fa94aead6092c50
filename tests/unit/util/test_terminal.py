"""Progress line, and the file in which a stage reports its progress."""

import io
import os
from pathlib import Path

import pytest

from podscale.util import env, progress_reports
from podscale.util.progress_reports import ProgressReporter, ProgressUpdate
from podscale.util.terminal import ProgressLine, format_progress, paint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_a_progress_line_says() -> None:
    text = format_progress(ProgressUpdate("pack", 500, 2000, rejects=3, seconds=5.0))
    assert text == f"pack      {'━' * 6}{'╌' * 18}  25%  500 of 2,000 images  100 images/s  0:15 left  3 unusable"
    assert format_progress(ProgressUpdate("list", 1, 0)) == "list      1 image"
    assert "100%" in format_progress(ProgressUpdate("evaluate", 12, 10, seconds=1.0)), "padding is no image"


def test_the_line_is_drawn_again_cut_to_the_terminal_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        line = ProgressLine(stream)
        line(ProgressUpdate("pack", 500, 2000, seconds=5.0))
        line(ProgressUpdate("pack", 2000, 2000, seconds=5.0, done=True))
        line.clear()
    assert terminal.getvalue() == f"\r\x1b[2Kpack      {'━' * 6}{'╌' * 3}\r\x1b[2K"
    assert pipe.getvalue() == ""


def test_colours_need_a_terminal_and_no_variable_against_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert paint("a", "bold green", Terminal()) == "\x1b[1;32ma\x1b[0m"
    assert paint("a", "green", io.StringIO()) == "a"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("a", "green", Terminal()) == "a"


def test_progress_goes_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.json"
    assert progress_reports.read_progress(path) is None
    monkeypatch.setenv(env.PROGRESS_FILE, str(path))
    ticker = ProgressReporter("evaluate", progress_reports.progress_from_env(), 100)
    ticker.set(100, 0, 0)
    ticker.close()
    update = progress_reports.read_progress(path)
    assert update is not None
    assert (update.stage, update.images, update.total, update.done) == ("evaluate", 100, 100, True)
    assert os.listdir(tmp_path) == ["progress.json"]  # noqa: PTH208
    path.write_text('{"stage"')
    assert progress_reports.read_progress(path) is None
    progress_reports.write_progress_to(tmp_path / "gone" / "p.json")(update)
    monkeypatch.delenv(env.PROGRESS_FILE)
    assert progress_reports.progress_from_env() is progress_reports.ignore_progress
