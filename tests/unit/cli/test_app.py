"""The command line from outside: speed of imports, messages, exit codes, help, completion."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from podscale.cli import main
from podscale.config import loads
from podscale.errors import ExitCode
from podscale.util import env
from podscale.version import VERSION
from tests.support.outcomes import assert_error

ROOT = Path(__file__).resolve().parents[3]


def test_help_imports_nothing_heavy():
    """The time depends on the machine, so the test checks the imports that decide it."""
    script = (
        "import sys, podscale.cli as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & "
        "{'pydantic', 'kfp', 'torch', 'numpy', 'yaml', 'sklearn', 'PIL'}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert re.search(r"Exit codes: 0 ", done.stdout)


def test_every_exit_code_is_in_the_help_and_in_the_documentation(capsys):
    main(["--help"])
    printed = capsys.readouterr().out
    documented = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    for code in [*map(int, ExitCode), 130]:
        assert re.search(rf"\b{code}\b", printed)
        assert f"| {code} |" in documented


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"podscale {VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "field", "says"),
    [
        (["config", "--set", "train.epoch=3"], "--set train.epoch=3", ["train.epochs"]),
        (["config", "imagenete"], "imagenete", ["imagenette"]),
        (["run", "missing.yaml"], "missing.yaml", []),
        (["compile", "-o", "pipeline.txt"], "pipeline.txt", [".yaml"]),
        (["compile", "-o", "no/such/folder/pipeline.yaml"], "no/such/folder/pipeline.yaml", ["folder"]),
        (["shard", "--index", "2", "--of", "2"], "--index", ["from 0 to 1"]),
        (["shard", "--inspect", "nowhere"], "nowhere", []),
        (["evaluate", "."], ".", ["two or more models"]),
        (["evaluate", "a", "b"], "a", ["directory"]),
        (["evaluate", ".", "."], ".", ["--shard-set"]),
        (["evaluate", ".", ".", "--shard-set", "s"], ".", ["podscale collapse"]),
        (["train", "--set", "data.source=/no/such/folder"], "", ["datasets/", "podscale shard"]),
        (["shard", "--set", "data.source=/no/such/folder"], "", ["data.source", "/no/such/folder"]),
        (["run", "imagefolder"], "", ["data.source", "/path/to/photos"]),
        (["report", "--set", "run.id=absent"], "runs/absent", ["podscale train"]),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments, field, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_error(main(arguments), capsys.readouterr().err, *says, field=field)


def test_wrong_usage_is_exit_code_2(capsys):
    assert main(["run", "--no-such-option"]) == 2
    assert "--no-such-option" in capsys.readouterr().err


def test_config_prints_the_resolved_document(capsys):
    assert main(["config", "--set", "train.epochs=3"]) == 0
    text = capsys.readouterr().out
    config = loads(text)
    assert config.train.epochs == 3
    assert config.run.id == "digits"
    assert main(["config", "--json", "--set", "train.epochs=3"]) == 0
    assert loads(capsys.readouterr().out) == config
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "RunConfig"


def test_config_draws_the_schedules(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    target = tmp_path / "curves.svg"
    assert main(["config", "goyal2017-8k", "--svg", str(target)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "Learning rate"
    assert rows[1].startswith("      3.2 |")
    assert rows[8].count("█") == 16, "30 of 90 epochs in 48 columns"
    assert 12 <= rows[1].count("█") < 16, "without the warm-up"
    assert "Momentum" not in "".join(rows), "what does not change is not drawn"
    root = ElementTree.fromstring(target.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "Learning rate" in "".join(root.itertext())
    path = next(element.get("d") for element in root.iter("{http://www.w3.org/2000/svg}path"))
    assert len(path.split("L")) > 100


def test_config_draws_what_changes(capsys, tmp_path):
    assert main(["config", "digits", "--plot", "--set", "train.phases=[{start: 8, weight_decay: 0.001}]"]) == 0
    printed = capsys.readouterr().out
    assert "Weight decay\n    0.001 |" in printed
    decay = printed.partition("Weight decay\n")[2].splitlines()
    assert decay[0].count("█") == pytest.approx(decay[7].count("█") / 2, abs=1), "from the middle of the run on"
    nowhere = tmp_path / "no" / "where.svg"
    assert_error(main(["config", "digits", "--svg", str(nowhere)]), capsys.readouterr().err, field=nowhere)


def test_a_recipe_is_shown_and_written(capsys):
    recipe = ["--set", "train.recipe=mlperf-lars", "--set", "train.global_batch=6000"]
    code = main(["config", "imagefolder", *recipe])
    assert_error(code, capsys.readouterr().err, "train.recipe", "mlperf-lars", "sgd")
    assert main(["config", "jia2018-64k", "--set", "train.global_batch=40960"]) == 0
    streams = capsys.readouterr()
    for part in ("mlperf-lars", "40,960", "35,840 (NVIDIA, v2.0)", "55,296"):
        assert part in streams.err
    assert yaml.safe_load(streams.out)["train"]["recipe_origin"] in streams.err


def test_compile_warns_of_what_a_cluster_would_miss(capsys, tmp_path):
    assert main(["compile", "--set", "run.workspace=runs", "-o", str(tmp_path / "p.yaml")]) == 0
    assert "note: run.workspace: " in capsys.readouterr().err
    package = next(yaml.safe_load_all((tmp_path / "p.yaml").read_text()))
    assert package["pipelineInfo"]["name"] == "podscale-training"


def test_presets_are_listed(capsys):
    assert main(["presets", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) >= {"digits", "imagefolder", "imagenette"}


def test_dry_run_says_what_would_happen_and_leaves_no_trace(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for part in ("2 processes", "701,466 parameters", "epochs of batches of 64", "per process", "train       to do"):
        assert part in printed
    assert list(tmp_path.iterdir()) == []
    assert main(["run", "--dry-run", "--set", "train.phases=[{start: 3, global_batch: 128}]"]) == 0
    assert re.search("^training .* 64, .* 128 .* epoch 3", capsys.readouterr().out, re.MULTILINE)
    assert main(["run", "--dry-run", "--set", "train.start_from=a.pt"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^start .* a\.pt$", printed, re.MULTILINE)
    assert re.search(r"train\.start_from\.weights: .*\(got 'a\.pt'\)", printed)
    assert main(["run", "--dry-run", "--set", "data.source=/no/such"]) == 0
    (problem,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  - ")]
    assert "data.source" in problem
    assert "/no/such" in problem


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("podscale co", "config"), ("podscale run imagene", "imagenette"), ("podscale run --se", "--set")],
)
def test_completion(typed, expected):
    environment = {
        **os.environ,
        "_PODSCALE_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
    }
    done = subprocess.run([sys.executable, "-m", "podscale"], env=environment, capture_output=True, text=True)
    assert expected in done.stdout


def test_contact_sheets_and_damage(digits_run, capsys, tmp_path):
    folder = tmp_path / "look"
    assert main(["shard", "--inspect", str(digits_run.shard_set), "--contact-sheet", str(folder)]) == 0
    assert [path.read_bytes()[1:4] for path in sorted(folder.iterdir())] == [b"PNG", b"PNG"]
    assert str(folder / "train.png") in capsys.readouterr().err
    (tmp_path / "file").touch()
    code = main(["shard", "--inspect", str(digits_run.shard_set), "--contact-sheet", str(tmp_path / "file")])
    assert_error(code, capsys.readouterr().err, field=tmp_path / "file")
    assert main(["shard", "--contact-sheet", str(folder)]) == 2
    copy = tmp_path / "copy"
    shutil.copytree(digits_run.shard_set, copy)
    next(copy.glob("train/*.tar")).write_bytes(b"")
    code = main(["shard", "--inspect", str(copy), "--verify"])
    assert_error(code, capsys.readouterr().err, "1 damaged", field=copy, exit_code=ExitCode.FAILED)


def test_the_command_as_typed_reaches_the_stages(monkeypatch):
    monkeypatch.delenv(env.COMMAND, raising=False)
    main(["presets", "--json"])
    assert os.environ[env.COMMAND] == "podscale presets --json"
    main(["config", "digits", "--set", "run.id=a", "--set", "data.source=my photos", "--json"])
    assert os.environ[env.COMMAND] == "podscale config digits --set run.id=a --set 'data.source=my photos' --json"
