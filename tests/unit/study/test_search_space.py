"""Search space of a study for an optimizer, and the trials of one choice."""

from pathlib import Path
from typing import Any

import pytest

from podscale.errors import InputError
from podscale.study import StudyDocument
from podscale.study.experiment_trial import mean_results, parse_choice, run_experiment_trial
from podscale.study.grid import TrialGrid
from podscale.study.protocol import protocol_digest, read_launches
from podscale.study.records import RecordStore, TrialRecord
from podscale.study.search_space import SearchParameter, count_choices, narrow_study, search_space
from podscale.study.sweep_series import Trial
from podscale.util import env
from tests.support.refusals import refused

RUN = {"train": {"epochs": 10}, "launch": {"processes": 1}}
RATE = {"at": 0.1, "batch": 64, "rule": "linear", "sweep": {"factors": [0.5, 1, 2]}}
VARIANTS = [{"name": "plain run"}, {"name": "nesterov", "set": {"train.optimizer.nesterov": False}}]
SEARCH = {"train.schedule.learning_rate": [0.1, 0.2]}
GRID = {"train.global_batch": [64, 128], "train.schedule.name": ["cosine", "constant"]}


def study(**section: Any) -> StudyDocument:
    values = {"name": "s", "run": RUN, "seeds": [1, 2], "variants": VARIANTS, "grid": GRID, "learning_rate": RATE}
    return StudyDocument.model_validate({**values, **section})


def tried(choice: dict[str, str], document: StudyDocument | None = None) -> list[Trial]:
    """Return the trials of one choice."""
    grid = TrialGrid(narrow_study(document or study(), choice))
    return grid.due_trials(lambda key: None)


def test_the_parameters_are_variant_grid_and_rate() -> None:
    parameters = search_space(study())
    assert parameters == [
        SearchParameter("variant", ("plain run", "nesterov")),
        SearchParameter("train.global_batch", ("64", "128"), has_order=True),
        SearchParameter("train.schedule.name", ("cosine", "constant")),
        SearchParameter("rate_factor", ("0.5", "1.0", "2.0"), has_order=True),
    ]
    assert count_choices(parameters) == 2 * 2 * 2 * 3


def test_a_choice_is_one_point_with_every_seed() -> None:
    choice = {"variant": "nesterov", "train.global_batch": "128", "train.schedule.name": "constant"}
    trials = tried({**choice, "rate_factor": "0.5"})
    assert [trial.seed for trial in trials] == [1, 2]
    (rate,) = {trial.rate for trial in trials}
    assert rate == 0.1 * 2 * 0.5  # linear rule from batch 64 to 128, and the factor
    config = trials[0].config.train
    assert (config.global_batch, config.schedule.name, config.optimizer.nesterov) == (128, "constant", False)


def test_its_trials_have_the_keys_of_the_whole_study() -> None:
    """So that both share their records. The sweep of the study tries the factor 2 too, with its first seed."""
    document = study()
    choice = {"variant": "plain run", "train.global_batch": "64", "train.schedule.name": "cosine", "rate_factor": "2.0"}
    swept = {trial.key for trial in TrialGrid(document).due_trials(lambda key: None)}
    assert tried(choice)[0].key in swept


def test_criteria_of_the_study_do_not_hinder_a_trial_and_stay_in_its_protocol(tmp_path: Path) -> None:
    """The launch is that of the whole study, not of the one choice, whose digest would be another one."""
    criterion = {"name": "x", "variant": "nesterov", "than": "plain run"}
    rate = {"at": 0.1}
    document = study(
        criteria=[criterion], seeds=[1, 2, 3], learning_rate=rate, set={"run.workspace": str(tmp_path)}, grid={}
    )
    store = RecordStore(str(tmp_path))
    for trial in tried({"variant": "nesterov"}, document):
        store.add(TrialRecord(trial.key, "done", {}, trial.seed, top1=0.5, loss=1.0))
    environ = {env.STUDY: document.model_dump_json(), env.TRIAL: "variant=nesterov\n"}
    assert run_experiment_trial(environ) == {"top1": 0.5, "loss": 1.0}
    (launch,) = read_launches(store.study_directory(document.name))
    assert launch.digest == protocol_digest(document)


def test_without_a_rate_the_run_s_own_is_kept() -> None:
    document = study(learning_rate=None)
    assert [parameter.name for parameter in search_space(document)][-1] == "train.schedule.name"
    choice = {"variant": "plain run", "train.global_batch": "64", "train.schedule.name": "cosine"}
    assert {trial.rate for trial in tried(choice, document)} == {
        TrialGrid(document).series[0].config.train.schedule.learning_rate
    }


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"choose": "updates", "target": 0.9}, "choose"),
        ({"variants": [VARIANTS[0], {"name": "b", "learning_rate": {"at": "plain run"}}]}, "learning_rate.at"),
        ({"variants": [VARIANTS[0], {"name": "b", "learning_rate": {"at": 1.0}}]}, "learning_rate.sweep"),
        ({"variants": VARIANTS[:1], "grid": {}, "learning_rate": None}, "grid"),
        ({"learning_rate": None, "selection": {}, "variants": [{"name": "a", "search": SEARCH}]}, "search"),
        ({"pretraining": [{"name": "p"}], "variants": [VARIANTS[0], {"name": "b", "start_from": "p"}]}, "start_from"),
        ({"variants": [VARIANTS[0], {"name": 'the "best"'}]}, "variant"),
        ({"grid": {"train.mix": [{"mixup": 0.0}, {"mixup": 0.2}]}}, "grid.train.mix"),
    ],
)
def test_what_one_optimizer_cannot_choose_is_refused(section: dict[str, Any], field: str) -> None:
    with refused(field=field, kind=InputError):
        search_space(study(**section))


@pytest.mark.parametrize("choice", [{"train.global_batch": "96"}, {"variant": "other"}, {}])
def test_an_unknown_value_is_refused(choice: dict[str, str]) -> None:
    complete = {"variant": "plain run", "train.global_batch": "64", "train.schedule.name": "cosine"}
    with refused(kind=InputError):
        narrow_study(study(), {**complete, **choice} if choice else {})


def test_results_are_means_over_the_seeds() -> None:
    def record(top1: float | None, loss: float | None) -> TrialRecord:
        return TrialRecord("k", "done" if top1 is not None else "diverged", {}, 1, top1=top1, loss=loss)

    assert mean_results([record(0.9, 1.0), record(0.7, 2.0)]) == pytest.approx({"top1": 0.8, "loss": 1.5})
    assert mean_results([record(0.9, 1.0), record(None, None)]) == pytest.approx({"top1": 0.45})
    assert parse_choice("variant=a b\ntrain.x=1=2\n") == {"variant": "a b", "train.x": "1=2"}
