"""`podscale export`: the report on standard output, and the exit code."""

from pathlib import Path

import pytest

from podscale.cli import main
from tests.support.outcomes import assert_error
from tests.support.prediction import write_model_run


def test_the_digits_check_a_model_without_its_shard_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model_run(tmp_path)
    run = tmp_path / "runs" / "small"
    assert main(["export", str(run), "--format", "safetensors", "--limit", "7"]) == 0
    printed = capsys.readouterr().out
    assert "7 of 7" in printed
    assert "digits" in printed
    assert (run / "export" / "model.safetensors.json").exists()


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, field in ((["none"], tmp_path / "none"), (["", "--format", "tflite"], "--format")):
        code = main(["export", str(tmp_path / arguments[0]), *arguments[1:]])
        assert_error(code, capsys.readouterr().err, field=field)
