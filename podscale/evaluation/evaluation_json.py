"""evaluation.json: scores, data identity, throughput, and the comparison with the run's claim.

Its JSON schema is generated from these models, docstrings included, and committed as evaluation.schema.json.
"""

import math
from pathlib import Path

import numpy as np
from pydantic import Field

from podscale.config import RunConfig, fingerprint, result_values
from podscale.data.shard_set import ShardSet
from podscale.errors import InputError
from podscale.evaluation.ensemble_scores import EnsembleScores, SchemaBase, build_ensemble_scores
from podscale.evaluation.history import RunHistory, finite_number, read_history
from podscale.evaluation.scores import CALIBRATION_SOURCE, Scores, compute_scores
from podscale.runs import RunDirectory
from podscale.runs.ensemble_members import combined_model_directories
from podscale.runs.model_files import read_evaluated_models
from podscale.runs.predictions import read_predictions
from podscale.util.files import file_sha256, write_atomically
from podscale.util.formatting import first_line, printable

SCHEMA_VERSION = 1
SPLIT = "validation"
"""Split that is scored."""
MATRIX_CLASSES = 20
"""Most classes with a full confusion matrix; with more, only the most confused pairs are written."""
CONFUSED_PAIRS = 200
"""Most confused pairs written."""


class EvaluationIdentity(SchemaBase):
    """Run, model and split that the scores belong to."""

    run: str
    document: str = Field(description="Fingerprint of the run document's result fields.")
    model: str = Field(description="Architecture, by its name in the catalogue.")
    model_sha256: str | None = Field(
        description="Hash of model/model.safetensors; null without that file, and for several models."
    )
    shard_set: str = Field(description="Location of the shard set.")
    data_fingerprint: str
    plan_fingerprint: str
    classes_sha256: str
    split: str


class SplitScores(SchemaBase):
    """Scores over the split; null for a value that is not finite (a diverged model)."""

    samples: int = Field(ge=1)
    classes: int = Field(ge=1)
    top1: float = Field(ge=0, le=1, description="Fraction of samples whose most probable class is the true one.")
    top1_interval: tuple[float, float] = Field(description="95 % Wilson score interval of top1.")
    top5: float = Field(ge=0, le=1)
    top5_k: int = Field(ge=1, description="5, or the number of classes if that is less.")
    balanced_accuracy: float | None = Field(description="Mean accuracy over classes that have samples.")
    loss: float | None = Field(description="Mean cross-entropy in nats, without label smoothing.")
    ece: float | None = Field(description="Expected calibration error.")


class Throughput(SchemaBase):
    """Seconds and images per second; null if not measured."""

    evaluation_seconds: float | None = Field(None, ge=0)
    evaluation_images_per_second: float | None = Field(None, ge=0)
    training_seconds: float | None = Field(None, ge=0, description="Over all launches, first to last log line.")
    training_images_per_second: float | None = Field(None, ge=0, description="Over all ranks, steps only.")
    processes: int | None = Field(None, ge=1)


class ClaimCheck(SchemaBase):
    """One value of the published run and the achieved one; null if unknown."""

    claimed: float | None
    achieved: float | None


class Claim(SchemaBase):
    """Claim of the run document, compared with the achieved values."""

    top1: ClaimCheck
    minutes: ClaimCheck
    images_per_second: ClaimCheck
    hardware: str | None
    source: str | None


class ClassScores(SchemaBase):
    """One class; `accuracy` is its recall. Null for a ratio without denominator."""

    name: str
    samples: int
    predicted: int
    correct: int
    accuracy: float | None
    precision: float | None


class ConfusedPair(SchemaBase):
    """Number of samples of class `label` that were predicted as class `predicted` (indices)."""

    label: int
    predicted: int
    count: int


class CalibrationBins(SchemaBase):
    """Reliability diagram: equal-width bins over top-1 confidence, bin m = ((m - 1) / M, m / M]."""

    source: str
    edges: list[float]
    count: list[int]
    confidence: list[float | None]
    accuracy: list[float | None]
    temperature: float | None = Field(
        None,
        description="Divisor of the logits that makes the mean cross-entropy least (Guo et al. 2017, section 4.2); "
        "null if it is not known.",
    )


class Evaluation(SchemaBase, populate_by_name=True):
    """The document evaluation.json."""

    schema_version: int = SCHEMA_VERSION
    identity: EvaluationIdentity
    scores: SplitScores = Field(alias="figures")
    throughput: Throughput
    claim: Claim
    per_class: list[ClassScores]
    confused: list[ConfusedPair] = Field(description="Most frequent mistakes, at most 200.")
    confusion_matrix: list[list[int]] | None = Field(description="Rows are true classes; null above 20 classes.")
    calibration: CalibrationBins
    ensemble: EnsembleScores | None = Field(None, description="If several models were evaluated together.")


def evaluate_run(run_directory: Path, config: RunConfig, shard_set: ShardSet) -> Evaluation:
    """Score <run>/predictions.safetensors and write <run>/evaluation.json.

    Throughput comes from the events in metrics.jsonl; of several models evaluated together, from their passes.

    Raises:
        InputError: Predictions are missing, or do not cover each sample of the split exactly once.
    """
    run = RunDirectory(run_directory)
    predictions = read_predictions(run.predictions)
    keys = shard_set.split(SPLIT).keys
    if not np.array_equal(predictions.keys, np.sort(keys)):
        raise InputError(
            f"does not hold each of the {len(keys)} samples of the split {SPLIT} of {shard_set.directory} exactly once",
            field=str(run.predictions),
            got=len(predictions),
            hint="Run `podscale evaluate` again.",
        )
    throughput = build_throughput(read_history(run.metrics))
    weights, ensemble = run.model / "model.safetensors", None
    if combined_model_directories(config):
        ensemble = build_ensemble_scores(config, read_evaluated_models(config, shard_set.classes), run.ensemble)
        rate = ensemble.headline.answered.images_per_second
        measured = {
            "evaluation_seconds": len(predictions) / rate if rate else None,
            "evaluation_images_per_second": rate,
        }
        throughput = throughput.model_copy(update=measured)
    identity = EvaluationIdentity(
        run=config.run.id,
        document=fingerprint(result_values(config)),
        model=config.model.name,
        model_sha256=file_sha256(weights) if weights.exists() and ensemble is None else None,
        shard_set=str(shard_set.directory),
        data_fingerprint=shard_set.manifest.data_fingerprint,
        plan_fingerprint=shard_set.manifest.plan_fingerprint,
        classes_sha256=shard_set.manifest.classes_sha256,
        split=SPLIT,
    )
    scores = compute_scores(predictions, len(shard_set.classes))
    evaluation = build_evaluation(scores, shard_set.classes, config, identity, throughput, ensemble)
    write_evaluation(run.evaluation, evaluation)
    return evaluation


def build_evaluation(
    scores: Scores,
    classes: list[str],
    config: RunConfig,
    identity: EvaluationIdentity,
    throughput: Throughput,
    ensemble: EnsembleScores | None = None,
) -> Evaluation:
    """Build the contents of evaluation.json from the scores. `classes` has the class names in the order of indices."""
    has_matrix = scores.classes <= MATRIX_CLASSES
    return Evaluation(
        identity=identity,
        scores=SplitScores(
            samples=scores.count,
            classes=scores.classes,
            top1=scores.top1,
            top1_interval=scores.top1_interval,
            top5=scores.top5,
            top5_k=scores.top5_k,
            balanced_accuracy=_finite_or_none(scores.balanced_accuracy),
            loss=_finite_or_none(scores.loss),
            ece=_finite_or_none(scores.calibration.ece),
        ),
        throughput=throughput,
        claim=compare_claim(config, scores.top1, throughput.training_seconds, throughput.training_images_per_second),
        per_class=_class_scores(scores, classes),
        confused=[
            ConfusedPair(label=label, predicted=predicted, count=count)
            for label, predicted, count in scores.confusion.most_frequent(CONFUSED_PAIRS)
        ],
        confusion_matrix=scores.confusion.matrix().tolist() if has_matrix else None,
        calibration=CalibrationBins(
            source=CALIBRATION_SOURCE,
            edges=scores.calibration.edges.tolist(),
            count=scores.calibration.count.tolist(),
            confidence=list(map(_finite_or_none, scores.calibration.confidence)),
            accuracy=list(map(_finite_or_none, scores.calibration.accuracy)),
            temperature=scores.calibration.temperature,
        ),
        ensemble=ensemble,
    )


def compare_claim(
    config: RunConfig, top1: float | None, training_seconds: float | None, images_per_second: float | None
) -> Claim:
    """Compare the document's claim with the achieved values.

    Args:
        top1: Fraction, 0 to 1; None if unknown.
        training_seconds: Seconds over all launches; None if unknown.
        images_per_second: Training throughput; None if unknown.
    """
    claim = config.claim
    minutes = None if training_seconds is None else training_seconds / 60
    return Claim(
        top1=ClaimCheck(claimed=claim.top1, achieved=top1),
        minutes=ClaimCheck(claimed=claim.minutes, achieved=minutes),
        images_per_second=ClaimCheck(claimed=claim.images_per_second, achieved=images_per_second),
        hardware=claim.hardware,
        source=claim.source,
    )


def build_throughput(history: RunHistory) -> Throughput:
    """Return the throughput of the training and of the newest evaluation; both include the time to read images."""
    event = history.newest("evaluated") or {}
    seconds, images = finite_number(event.get("seconds")), finite_number(event.get("images"))
    return Throughput(
        evaluation_seconds=seconds,
        evaluation_images_per_second=images / seconds if images and seconds else None,
        training_seconds=history.seconds if history.steps else None,
        training_images_per_second=history.images_per_second(),
        processes=event.get("processes"),
    )


def write_evaluation(path: Path, evaluation: Evaluation) -> None:
    write_atomically(path, evaluation.model_dump_json(indent=1, by_alias=True) + "\n")


def read_evaluation(path: Path) -> Evaluation:
    """Read evaluation.json. Raises InputError if it is missing or invalid."""
    try:
        return Evaluation.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError("the model was not evaluated yet", field=str(path), hint="Run `podscale evaluate`") from error
    except (OSError, ValueError) as error:
        hint = "Run `podscale evaluate` again."
        raise InputError(f"not an evaluation ({first_line(error)})", field=str(path), hint=hint) from error


def kfp_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return the values of a Kubeflow Pipelines (KFP) Metrics artifact, without unknown ones."""
    scores, throughput = evaluation.scores, evaluation.throughput
    candidates = {
        "top1": scores.top1,
        "top5": scores.top5,
        "loss": scores.loss,
        "ece": scores.ece,
        "balanced_accuracy": scores.balanced_accuracy,
        "samples": scores.samples,
        "evaluation_images_per_second": throughput.evaluation_images_per_second,
        "training_images_per_second": throughput.training_images_per_second,
        "training_minutes": evaluation.claim.minutes.achieved,
        "claimed_top1": evaluation.claim.top1.claimed,
    }
    return {name: float(value) for name, value in candidates.items() if value is not None}


def confusion_for_kfp(evaluation: Evaluation) -> tuple[list[str], list[list[int]]] | None:
    """Return class names and matrix for a KFP ClassificationMetrics artifact; None above MATRIX_CLASSES classes."""
    if evaluation.confusion_matrix is None:
        return None
    return [entry.name for entry in evaluation.per_class], evaluation.confusion_matrix


def _class_scores(scores: Scores, classes: list[str]) -> list[ClassScores]:
    per_class = scores.per_class
    accuracy, precision = per_class.accuracy, per_class.precision
    return [
        ClassScores(
            name=printable(name),  # a class map may hold bytes that are not text
            samples=int(per_class.support[i]),
            predicted=int(per_class.predicted[i]),
            correct=int(per_class.correct[i]),
            accuracy=_finite_or_none(accuracy[i]),
            precision=_finite_or_none(precision[i]),
        )
        for i, name in enumerate(classes)
    ]


def _finite_or_none(value: float | np.float64) -> float | None:
    return float(value) if math.isfinite(value) else None
