"""The learning proof's script: what it runs, what it keeps when it is stopped, and what its tables say."""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from podscale.config import RunConfig
from podscale.evaluate.history import parse_history

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # scripts import each other by name

import learning  # noqa: E402
import learning_parts as parts  # noqa: E402
import learning_results as results  # noqa: E402
import trials  # noqa: E402
from trials import Record, Records, Trial  # noqa: E402

CODE = "0123456789abcdef"


def record(trial: Trial, top1: float | None, **more: Any) -> Record:
    ended = 0 if top1 is not None else 1
    return Record(trial.family, trial.settings, trial.seed, "c" * 40, CODE, ended, top1=top1, **more)


def three(get: trials.Get) -> Iterator[Trial]:
    """Two trials, and a third one that only the results of both ask for."""
    first = [Trial("photographs", {"train.epochs": n}, 1) for n in (1, 2)]
    yield from first
    if all(get(trial) is not None for trial in first):
        yield Trial("photographs", {"train.epochs": 3}, 1)


class TestResuming:
    def test_a_stopped_script_goes_on_where_it_was(self, tmp_path: Path) -> None:
        ran: list[int] = []

        def run(trial: Trial) -> Record:
            if len(ran) == 1:
                raise KeyboardInterrupt
            ran.append(trial.settings["train.epochs"])
            return record(trial, 0.5)

        with pytest.raises(KeyboardInterrupt):
            trials.run_due(three, Records(tmp_path, CODE), run, jobs=1)
        assert ran == [1]

        def go_on(trial: Trial) -> Record:
            ran.append(trial.settings["train.epochs"])
            return record(trial, 0.5)

        trials.run_due(three, Records(tmp_path, CODE), go_on, jobs=2)
        assert ran == [1, 2, 3]
        trials.run_due(three, Records(tmp_path, CODE), go_on, jobs=2)
        assert ran == [1, 2, 3]

    def test_records_of_other_code_do_not_count(self, tmp_path: Path) -> None:
        trial = Trial("photographs", {}, 1)
        Records(tmp_path, CODE).add(trial, record(trial, 0.5))
        assert Records(tmp_path, CODE).get(trial) == record(trial, 0.5)
        assert Records(tmp_path, "f" * 40).get(trial) is None

    def test_a_part_is_not_continued_with_other_code(self, tmp_path: Path) -> None:
        learning.Place(tmp_path).begin("a", CODE, restart=False)
        learning.Place(tmp_path).begin("a", CODE, restart=False)
        with pytest.raises(SystemExit, match="part a began"):
            learning.Place(tmp_path).begin("a", "f" * 40, restart=False)
        learning.Place(tmp_path).begin("a", "f" * 40, restart=True)
        assert learning.Place(tmp_path).records_of("a").code == "f" * 40

    def test_a_folder_belongs_to_one_set_of_documents(self, tmp_path: Path) -> None:
        learning.Place(tmp_path).keep(parts.DOCUMENTS)
        learning.Place(tmp_path).keep(parts.DOCUMENTS)
        with pytest.raises(SystemExit, match="other documents"):
            learning.Place(tmp_path).keep({"photographs": {**parts.PHOTOGRAPHS, "model.width": 32}})

    def test_a_trial_is_known_by_its_settings_in_any_order(self) -> None:
        one = Trial("photographs", {"a": 1, "b": 2}, 1)
        assert one.key == Trial("photographs", {"b": 2, "a": 1}, 1).key
        assert (
            len({one.key, Trial("photographs", {"a": 1, "b": 3}, 1).key, Trial("photographs", one.settings, 2).key})
            == 3
        )
        assert parts.photographs(1, {"train.global_batch": 256}) == parts.photographs(1, {})


class TestPlan:
    @staticmethod
    def known(accuracy: Callable[[float], float | None]) -> trials.Get:
        """Records of every trial by its learning rate."""
        return lambda trial: record(trial, accuracy(trial.settings.get("train.schedule.learning_rate", 0.2)))

    def test_a_sweep_is_widened_towards_its_best_rate(self) -> None:
        sweep = parts.Sweep("sgd", 1024)
        assert list(sweep.trials(lambda trial: None)) == [0.2, 0.4, 0.8]
        assert list(sweep.trials(self.known(lambda rate: 1 / (1 + abs(rate - 0.4))))) == [0.2, 0.4, 0.8]
        assert sweep.best(self.known(lambda rate: 1 / (1 + abs(rate - 0.4)))) == 0.4
        assert sweep.best(self.known(lambda rate: 1 / (1 + abs(rate - 1.6)))) == 1.6
        assert list(sweep.trials(self.known(lambda rate: rate / 100))) == [0.2, 0.4, 0.8, 1.6, 3.2]
        assert list(sweep.trials(self.known(lambda rate: 1 - rate / 100))) == [0.05, 0.1, 0.2, 0.4, 0.8]

    def test_a_rate_that_diverged_is_not_the_best(self) -> None:
        sweep = parts.Sweep("lars", 256)
        assert sweep.best(lambda trial: None) is None
        assert sweep.best(self.known(lambda rate: None if rate > 3 else rate / 10)) == 2.0

    def test_arms_of_large_batches_follow_the_sweeps(self) -> None:
        found = parts.large_batch(self.known(lambda rate: 1 / (1 + abs(rate - 0.8))))
        assert [arm.name for arm in found["Batch 256"]] == ["SGD, linear rule, rate 0.8", "LARS, best rate 1"]
        names = [arm.name for arm in found["Batch 1,024"]]
        assert names[:2] == ["SGD, linear rule, rate 3.2", "SGD, best rate 0.8"]
        assert parts.large_batch(lambda trial: None) == {}

    def test_every_part_has_its_first_seed_before_any_has_its_second(self) -> None:
        seeds = [trial.seed for trial in parts.due([parts.PARTS["c"], parts.PARTS["b"]], self.known(lambda rate: 0.5))]
        assert seeds == sorted(seeds)
        assert set(seeds) == set(parts.SEEDS)

    @pytest.mark.parametrize("name", sorted(parts.PARTS))
    def test_every_training_is_a_valid_document(self, name: str) -> None:
        part = parts.PARTS[name]
        due = {trial.key: trial for trial in parts.due([part], self.known(lambda rate: 0.5))}
        assert len(due) >= 6
        for trial in due.values():
            settings = {**parts.DOCUMENTS[trial.family], **trial.settings, "run.seed": trial.seed, "run.id": trial.key}
            RunConfig.model_validate(trials.document(settings))


class TestResults:
    def test_a_comparison_tells_what_noise_can_explain(self, tmp_path: Path) -> None:
        records = Records(tmp_path, CODE)
        arms = [parts.Arm(name, parts.repeated({"train.epochs": n})) for n, name in ((1, "one"), (2, "two"), (3, "x"))]
        for arm, top1s in zip(arms, ((0.60, 0.61, 0.62), (0.65, 0.66, 0.67), (0.61, None, 0.63)), strict=True):
            for trial, top1 in zip(arm.trials, top1s, strict=True):
                records.add(trial, record(trial, top1, updates=444, training_loss=1.25))
        rows = [line.split(" | ") for line in results.comparison(arms, records)[2:]]
        assert rows[0] == ["| one", "444", "3", "61.00 \u00b1 1.00 %", "", "1.250 |"]
        assert rows[1][3:5] == ["66.00 \u00b1 1.00 %", "+5.00 \u00b1 2.27"]
        assert rows[2][2:5] == ["2 (1 diverged)", "62.00 \u00b1 1.41 %", "+1.00 \u00b1 3.35 (within noise)"]

    def test_curves_are_means_over_the_seeds(self, tmp_path: Path) -> None:
        records = Records(tmp_path, CODE)
        arm = parts.Arm("", parts.repeated({}))
        for shift, trial in enumerate(arm.trials):
            records.add(trial, record(trial, 0.5, curve=[(2.0, 0.2 + shift / 10), (4.0, 0.5)]))
        assert results.curve(arm, records) == [(2.0, pytest.approx(30.0), pytest.approx(10.0)), (4.0, 50.0, 0.0)]

    def test_results_name_every_training_and_its_code(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(results, "RESULTS", tmp_path)
        records = Records(tmp_path, CODE)
        trials.run_due(
            partial(parts.due, [parts.PARTS["c"]]),
            records,
            lambda trial: record(trial, 0.6 + trial.seed / 1000, curve=[(1.0, 0.3), (2.0, 0.6)]),
            jobs=1,
        )
        results.write_results(["# Learning", ""], {"c": records})
        text = (tmp_path / "learning.md").read_text()
        assert "every training: 6, with podscale/ at git tree 0123456789ab (commit cccccccccccc)" in text
        assert text.count("\n| bf16 | ") == 4  # and the row of the comparison
        assert "![bf16 and fp32](learning-c-curves.svg)" in text
        assert (tmp_path / "learning-c-curves.svg").read_text().startswith("<svg")


class TestMeasuring:
    LINES = (
        {"kind": "step", "step": 1, "epoch": 1.0, "loss": 2.0, "time": 1.0},
        {"kind": "step", "step": 2, "epoch": 1.5, "loss": 1.5, "time": 2.0},
        {"kind": "step", "step": 3, "epoch": 2.2, "loss": 1.1, "time": 3.0},
        {"kind": "evaluation", "step": 3, "epoch": 2.2, "top1": 0.6, "top5": 0.9, "loss": 1.0, "time": 4.0},
        {"kind": "event", "event": "done", "step": 3, "skipped_updates": 1, "time": 5.0},
    )

    def test_a_training_is_read_from_its_log(self) -> None:
        history = parse_history([json.dumps(line).encode() for line in self.LINES])
        found = trials.measured(history, whole=True)
        assert found == {
            "curve": [(2.2, 0.6)],
            "updates": 3,
            "top1": 0.6,
            "loss": 1.0,
            "training_loss": pytest.approx(1.3),
            "masked": 1,
        }

    def test_a_training_that_failed_has_no_accuracy(self) -> None:
        history = parse_history([json.dumps(line).encode() for line in self.LINES[:4]])
        assert "top1" not in trials.measured(history, whole=False)
