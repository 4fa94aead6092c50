"""Ensemble section of evaluation.json: scores of each member and each combination, and the members' disagreement.

Class docstrings and field descriptions are part of the committed JSON schema.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from podscale.config import RunConfig
from podscale.evaluation.scores import wilson_interval
from podscale.runs.model_files import EvaluatedModel, EvaluatedModels
from podscale.runs.predictions import (
    COMBINE_METHODS,
    CombineMethod,
    EvaluationPass,
    Predictions,
    pass_predictions_path,
    read_passes,
    read_predictions,
)
from podscale.util.files import file_sha256
from podscale.util.formatting import printable


class SchemaBase(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class ScoreSummary(SchemaBase):
    """Scores of one model, or of several together."""

    top1: float = Field(ge=0, le=1)
    top1_interval: tuple[float, float] = Field(description="95 % Wilson score interval of top1.")
    top5: float = Field(ge=0, le=1)
    loss: float | None = Field(description="Mean cross-entropy in nats; null if not finite.")
    passes: int = Field(ge=1, description="Forward passes per image.")
    images_per_second: float | None = Field(
        description="Over the split, input included; passes run one after the other."
    )


class SingleModel(SchemaBase):
    """One model and its origin."""

    name: str = Field(description="Run that trained it.")
    directory: str
    model: str = Field(description="Architecture, by its name in the catalogue.")
    model_sha256: str
    started_from: str | None = Field(description="Run whose snapshot it started from.")
    started_epoch: float | None = Field(description="Epoch of the snapshot.")
    epochs_before: float = Field(ge=0, description="Epochs trained before its own run, over all earlier runs.")
    epochs: float = Field(gt=0, description="Epochs of its own run.")
    answered: ScoreSummary
    average: ScoreSummary | None = Field(description="Scores of the running average of its weights, if there is one.")


class Combination(SchemaBase):
    """One way of combining the members."""

    way: CombineMethod
    answered: ScoreSummary
    statistics_seconds: float | None = Field(
        description="Seconds to compute batch norm's statistics of the mean weights from training images."
    )


class EnsembleScores(SchemaBase):
    """Several models evaluated together."""

    combine: CombineMethod = Field(description="Combination that the document's scores belong to.")
    members: list[SingleModel]
    combined: list[Combination] = Field(description="`weights` is absent if architectures differ.")
    disagreement: list[list[float]] = Field(description="Fraction of samples whose top-1 classes differ, by pair.")
    epochs: float = Field(gt=0, description="Epochs trained in all; epochs that members share count once.")
    baseline: SingleModel | None = Field(description="Single model of evaluate.baseline.")

    @property
    def headline(self) -> Combination:
        return next(combination for combination in self.combined if combination.way == self.combine)


def build_ensemble_scores(config: RunConfig, models: EvaluatedModels, directory: Path) -> EnsembleScores:
    passes = read_passes(directory)
    # The other combinations are derived from the members' predictions without a pass.
    derived = [way for way in COMBINE_METHODS if way != "weights" and pass_predictions_path(directory, way).exists()]
    predictions = {name: read_predictions(pass_predictions_path(directory, name)) for name in [*passes, *derived]}
    names = [f"member-{number}" for number in range(len(models.members))]
    member_seconds = [passes[name].seconds for name in names]
    combined = [
        Combination(
            way=way,
            answered=_score_summary(predictions[way], [passes[way].seconds] if way in passes else member_seconds),
            statistics_seconds=passes[way].statistics_seconds if way in passes else None,
        )
        for way in COMBINE_METHODS
        if way in predictions
    ]
    return EnsembleScores(
        combine=config.evaluate.combine,
        members=[
            _single_model(member, passes, predictions, name, f"average-{number}")
            for number, (member, name) in enumerate(zip(models.members, names, strict=True))
        ],
        combined=combined,
        disagreement=pairwise_disagreement([predictions[name] for name in names]),
        epochs=total_epochs(models.members),
        baseline=_single_model(models.baseline, passes, predictions, "baseline") if models.baseline else None,
    )


def pairwise_disagreement(predictions: Sequence[Predictions]) -> list[list[float]]:
    """Return the fraction of samples whose top-1 classes differ, by pair; all predictions are of the same samples."""
    firsts = [member.sorted_by_key().topk[:, 0] for member in predictions]
    return [[float(np.mean(a != b)) for b in firsts] for a in firsts]


def total_epochs(members: Sequence[EvaluatedModel]) -> float:
    """Return the epochs that went into these models: their own, and those of the runs they started from.

    A run that several members started from counts once, up to the last snapshot used.
    """
    shared: dict[str, float] = {}
    for member in members:
        origin = member.description["training"].get("started_from") or {}
        if "run" in origin:
            shared[origin["run"]] = max(shared.get(origin["run"], 0.0), float(origin["epochs"]))
    return sum(shared.values()) + sum(float(member.description["training"]["epochs"]) for member in members)


def _single_model(
    model: EvaluatedModel,
    passes: dict[str, EvaluationPass],
    predictions: dict[str, Predictions],
    name: str,
    average: str = "",
) -> SingleModel:
    training = model.description["training"]
    origin = training.get("started_from") or {}
    return SingleModel(
        name=printable(model.name),
        directory=str(model.directory),
        model=model.model_section.name,
        model_sha256=file_sha256(model.weights),
        started_from=origin.get("run"),
        started_epoch=origin.get("epoch"),
        epochs_before=origin.get("epochs", 0.0),
        epochs=training["epochs"],
        answered=_score_summary(predictions[name], [passes[name].seconds]),
        average=_score_summary(predictions[average], [passes[average].seconds]) if average in passes else None,
    )


def _score_summary(predictions: Predictions, seconds: Sequence[float]) -> ScoreSummary:
    top1, top5 = predictions.top1_top5_accuracy()
    loss = float(predictions.losses.mean(dtype=np.float64))
    total = sum(seconds)
    return ScoreSummary(
        top1=top1,
        top1_interval=wilson_interval(round(top1 * len(predictions)), len(predictions)),
        top5=top5,
        loss=loss if np.isfinite(loss) else None,
        passes=len(seconds),
        images_per_second=len(predictions) / total if total else None,
    )
