"""evaluation.json follows the committed schema and agrees with the predictions."""

import json
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from podscale.config import loads
from podscale.data.shard_set import ShardSet
from podscale.evaluation import evaluation_json
from podscale.evaluation.evaluation_json import EvaluationIdentity, Throughput
from podscale.evaluation.scores import compute_scores
from podscale.runs import predictions
from podscale.runs.predictions import Predictions
from tests.support.digits_run import DigitsRun
from tests.support.refusals import refused

SCHEMA = Path(evaluation_json.__file__).parent / "evaluation.schema.json"


def wide(classes: int, n: int = 3000) -> Predictions:
    rng = np.random.default_rng(classes)
    labels = rng.integers(0, classes, n).astype(np.int32)
    topk = np.argsort(rng.random((n, classes)), axis=1)[:, :5].astype(np.int32)
    topk[: n // 2, 0] = labels[: n // 2]
    confidences = -np.sort(-rng.random((n, topk.shape[1])), axis=1).astype(np.float32)
    return Predictions(np.arange(n, dtype=np.uint64), labels, topk, confidences, rng.random(n).astype(np.float32))


def evaluation_with(classes: int, evaluation: Predictions, document: str = "") -> evaluation_json.Evaluation:
    names = [f"class {i}" for i in range(classes)]
    identity = EvaluationIdentity.model_validate(dict.fromkeys(EvaluationIdentity.model_fields, "a"))
    scores = compute_scores(evaluation, classes)
    return evaluation_json.build_evaluation(scores, names, loads(document), identity, Throughput())


def test_the_committed_schema_is_the_generated_one() -> None:
    assert json.loads(SCHEMA.read_text()) == evaluation_json.Evaluation.model_json_schema()


def test_a_real_evaluation_follows_the_schema(digits_run: DigitsRun) -> None:
    document = json.loads((digits_run.path / "evaluation.json").read_text())
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMA.read_text()))
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "surprise": 1}, json.loads(SCHEMA.read_text()))


def test_scores_follow_from_the_predictions(digits_run: DigitsRun) -> None:
    evaluation = predictions.read_predictions(digits_run.path / "predictions.safetensors")
    written = evaluation_json.read_evaluation(digits_run.path / "evaluation.json")
    right = int((evaluation.topk[:, 0] == evaluation.labels).sum())
    assert written.scores.top1 == pytest.approx(right / len(evaluation), abs=1e-15)
    assert written.scores.top1 > 0.8  # a softmax regression on digits that had trained
    assert sum(entry.correct for entry in written.per_class) == right
    assert written.confusion_matrix is not None
    assert np.trace(np.array(written.confusion_matrix)) == right
    assert sum(pair.count for pair in written.confused) == len(evaluation) - right


def test_the_claim_is_compared_with_the_result(digits_run: DigitsRun) -> None:
    claim = evaluation_json.read_evaluation(digits_run.path / "evaluation.json").claim
    assert (claim.top1.claimed, claim.minutes.claimed, claim.images_per_second.claimed) == (0.97, 2.0, None)
    assert claim.top1.achieved == pytest.approx(0.87, abs=0.06)
    assert claim.minutes.achieved is not None
    assert claim.images_per_second.achieved is not None
    assert claim.hardware == "one laptop core"


def test_a_thousand_classes_stay_small() -> None:
    evaluation = evaluation_with(1000, wide(1000))
    assert evaluation.confusion_matrix is None
    assert len(evaluation.confused) == evaluation_json.CONFUSED_PAIRS
    assert len(evaluation.model_dump_json()) < 300_000
    assert evaluation_json.confusion_for_kfp(evaluation) is None


def test_kfp_gets_floats_and_the_matrix_of_few_classes() -> None:
    evaluation = evaluation_with(20, wide(20), "claim: {top1: 0.5}")
    metrics = evaluation_json.kfp_metrics(evaluation)
    assert metrics["top1"] == evaluation.scores.top1
    assert metrics["claimed_top1"] == 0.5
    assert all(type(value) is float for value in metrics.values())
    assert "training_minutes" not in metrics  # not measured here, so not shown
    names, matrix = evaluation_json.confusion_for_kfp(evaluation) or ([], [])
    assert names[:2] == ["class 0", "class 1"]
    assert sum(map(sum, matrix)) == 3000


def test_a_diverged_model_writes_null_instead_of_nan(tmp_path: Path) -> None:
    p = wide(10)
    broken = Predictions(p.keys, p.labels, p.topk, np.full_like(p.confidences, np.nan), np.full_like(p.losses, np.inf))
    evaluation_json.write_evaluation(tmp_path / "e.json", evaluation_with(10, broken))
    document = json.loads((tmp_path / "e.json").read_text(), parse_constant=pytest.fail)
    assert document["figures"]["loss"] is None
    assert document["figures"]["ece"] is None


def test_predictions_that_miss_a_sample_are_refused(digits_run: DigitsRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(digits_run.path, run)
    p = predictions.read_predictions(run / "predictions.safetensors")
    predictions.write_predictions(
        run / "predictions.safetensors", Predictions(*(getattr(p, c)[1:] for c in predictions.PREDICTION_COLUMNS))
    )
    with refused("360 samples", field=run / "predictions.safetensors", got=359):
        evaluation_json.evaluate_run(run, digits_run.config, ShardSet.open(digits_run.shard_set))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 99}'])
def test_a_damaged_evaluation_is_bad_input(tmp_path: Path, content: str) -> None:
    (tmp_path / "evaluation.json").write_text(content)
    with refused("podscale evaluate", field=tmp_path / "evaluation.json"):
        evaluation_json.read_evaluation(tmp_path / "evaluation.json")
