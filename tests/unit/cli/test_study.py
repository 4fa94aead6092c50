"""`podscale study` through the command line: the plan that it prints, and the package that it compiles for KFP."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from podscale.cli import main
from podscale.cli import study as study_command
from podscale.errors import ExitCode
from podscale.pipelines import presets
from podscale.study import StudyDocument, read_study
from podscale.study.grid import TrialGrid
from podscale.study.records import RecordStore, TrialRecord
from tests.support.kfp_api import check_package
from tests.support.outcomes import assert_error


def test_a_plan_lists_what_a_time_box_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", f"run.workspace={tmp_path}", "--dry-run", "--jobs", "1"]
    assert main(["study", "digits-large-batch", *options]) == ExitCode.DONE
    output = capsys.readouterr().out
    assert re.search(r"digits-large-batch: 0 trials done, 26 to run, \D*1 more", output)
    assert "LEFT OUT" not in output
    assert main(["study", "digits-large-batch", *options, "--time-box", "2"]) == ExitCode.DONE
    output = capsys.readouterr().out
    assert re.search(r"estimate: 2:00 .*\b1 job\b", output)
    assert re.search(r"LEFT OUT .*\b16 trials", output)
    assert re.search(r"further seeds: 2, 3\b", output)
    assert main(["study", "digits-large-batch", *options, "--out", str(tmp_path / "out")]) == ExitCode.DONE
    assert not list(tmp_path.iterdir()), "a plan writes nothing"


def test_results_of_the_records_so_far_are_written_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document, out = tmp_path / "s.yaml", tmp_path / "new" / "out"
    document.write_text(f"name: s\nrun: digits\nset: {{run.workspace: {tmp_path}/w}}\nseeds: [1, 2]\n")
    study = read_study(document, {}, presets.resolve_preset)
    trial, _ = TrialGrid(study).due_trials(lambda key: None)
    RecordStore(f"{tmp_path}/w").add(TrialRecord(trial.key, "done", {}, 1, top1=0.75, loss=1.0))
    monkeypatch.setattr("podscale.study.console.StudyRunner", None)
    assert main(["study", str(document), "--results-only", "--out", str(out)]) == ExitCode.DONE
    assert "75.00" in capsys.readouterr().out
    assert "1 of 2" in (out / "s.md").read_text()
    assert not (tmp_path / "w/studies/results/s/launches.jsonl").exists()
    (own,) = (tmp_path / "w").rglob("s.md")
    assert main(["study", str(document), "--results-only", "--out", str(own.parent)]) == ExitCode.DONE
    assert "1 of 2" in own.read_text()


@pytest.mark.parametrize(
    ("words", "field", "says"),
    [
        (["digits-larg-batch"], "digits-larg-batch", ["digits-large-batch"]),
        (["digits-nlcg", "--backend", "kpf"], "--backend", ["kpf", "here", "kfp"]),
        (["digits-nlcg", "--out", f"{__file__}/out"], "--out", ["cannot be created", f"{__file__}/out"]),
        (["digits-nlcg", "--dry-run", "--trials", "3"], "--trials", ["here", "katib"]),
        (["digits-nlcg", "--dry-run", "-o", "s.yaml"], "--output", ["here", "kfp or --backend katib"]),
        (["digits-nlcg", "--dry-run", "--namespace", "a"], "--namespace", ["here", "kfp"]),
        (["digits-nlcg", "--backend", "kfp", "--algorithm", "tpe"], "--algorithm", ["katib"]),
        (["digits-nlcg", "--backend", "katib", "--jobs", "2"], "--jobs", ["here"]),
        (["digits-nlcg", "--set", "train.epochs"], "--set train.epochs", ["section.key=value"]),
        (["digits-nlcg", "--dry-run", "--set", "train.epoch=1"], "", ["train.epoch", "train.epochs"]),
        (["digits-nlcg", "--backend", "kfp", "-o", "study.json"], "study.json", [".yaml"]),
        (["digits-nlcg", "--backend", "kfp", "-o", "/no/such/study.yaml"], "/no/such/study.yaml", ["folder"]),
    ],
)
def test_bad_input_is_refused(
    words: list[str], field: str, says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert_error(main(["study", *words]), capsys.readouterr().err, *says, field=field)


def test_every_option_with_a_backend_is_one_of_the_command() -> None:
    command = typer.main.get_command(study_command.app)
    assert set(study_command.USED_WITH) <= {option.name for option in command.params}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("package") / "study.yaml"
    options = ["--set", "run.workspace=/workspace", "--set", "launch.image=registry/podscale:1", "--parallel", "5"]
    assert main(["study", "digits-large-batch", "--backend", "kfp", "-o", str(path), *options]) == ExitCode.DONE
    pipeline, _ = check_package(path.read_text())
    return pipeline


class TestPackage:
    def test_jobs_of_one_series_run_in_parallel_after_the_series_they_depend_on(self, pipeline: dict[str, Any]) -> None:
        tasks = pipeline["root"]["dag"]["tasks"]
        loops = [tasks[name] for name in tasks if name.startswith("for-loop")]
        items = [json.loads(loop["parameterIterator"]["items"]["raw"]) for loop in loops]
        assert items == [[0], [1, 2, 3, 4, 5, 6, 7]], "series that follow another's rate come after it"
        assert [loop["iteratorPolicy"]["parallelismLimit"] for loop in loops] == [5, 5]
        first, second = (name for name in tasks if name.startswith("for-loop"))
        assert tasks[first]["dependentTasks"] == ["shard"]
        assert tasks[second]["dependentTasks"] == [first]
        assert tasks["findings"]["dependentTasks"] == [second]

    def test_images_that_a_selection_holds_out_have_shards_before_its_trials(self, tmp_path: Path) -> None:
        path = tmp_path / "study.yaml"
        options = ["--set", "run.workspace=/workspace", "--set", "launch.image=registry/podscale:1"]
        assert main(["study", "lars-vs-sgd-small", "--backend", "kfp", "-o", str(path), *options]) == ExitCode.DONE
        tasks = check_package(path.read_text())[0]["root"]["dag"]["tasks"]
        shards = {name: task for name, task in tasks.items() if name.startswith("shard")}
        sections = (task["inputs"]["parameters"]["data"]["runtimeValue"]["constant"] for task in shards.values())
        assert sorted(json.loads(data)["holdout_fraction"] or 0 for data in sections) == [0, 0.1]
        (loop,) = (task for name, task in tasks.items() if name.startswith("for-loop"))
        assert sorted(loop["dependentTasks"]) == sorted(shards)

    def test_pretraining_is_in_an_earlier_loop_and_has_shards_of_its_own(self, tmp_path: Path) -> None:
        path = tmp_path / "study.yaml"
        options = ["--set", "run.workspace=/workspace", "--set", "launch.image=registry/podscale:1"]
        assert main(["study", "fine-tuning", "--backend", "kfp", "-o", str(path), *options]) == ExitCode.DONE
        tasks = check_package(path.read_text())[0]["root"]["dag"]["tasks"]
        loops = [task for name, task in tasks.items() if name.startswith("for-loop")]
        items = [json.loads(loop["parameterIterator"]["items"]["raw"]) for loop in loops]
        assert items == [[0, 3, 6], [1, 2, 4, 5]], "from scratch and the pretraining, then those that start from it"
        shards = [task for name, task in tasks.items() if name.startswith("shard")]
        sections = [json.loads(task["inputs"]["parameters"]["data"]["runtimeValue"]["constant"]) for task in shards]
        found = [(one["only_classes"][0], one["images_per_class"], one["holdout_fraction"]) for one in sections]
        assert len(found) == 5
        assert set(found) == {
            ("n01440764", None, None),
            *(("n03394916", count, part) for count in (40, 200) for part in (None, 0.1)),
        }

    def test_the_package_contains_the_study(self, pipeline: dict[str, Any]) -> None:
        study_text = pipeline["root"]["dag"]["tasks"]["findings"]["inputs"]["parameters"]["study"]
        study = StudyDocument.model_validate_json(study_text["runtimeValue"]["constant"])
        series = TrialGrid(study).series
        assert [one.name for one in series][:2] == ["the whole recipe", "no label smoothing"]
        assert series[0].config.run.workspace == "/workspace"

    def test_pods_are_those_of_the_run_document(self, pipeline: dict[str, Any]) -> None:
        executors = pipeline["deploymentSpec"]["executors"]
        for name in ("exec-shard", "exec-cells", "exec-findings"):
            assert executors[name]["container"]["image"] == "registry/podscale:1"
