"""Run document: its sections as fields, and the sections of the run itself.

The JSON schema for editors and the chart is generated from here. A section checks its own fields;
podscale.config.checks has the checks across sections.
"""

from typing import Literal

from podscale.config.data import DataSection, InputSection
from podscale.config.ensemble import EnsembleSection
from podscale.config.fields import Section, display_field, placement_field, result_field
from podscale.config.launch import LaunchSection
from podscale.config.model import ModelSection
from podscale.config.telemetry import TelemetrySection
from podscale.config.train import TrainSection


class RunSection(Section):
    """Identity and workspace of the run."""

    id: str = placement_field(
        "run",
        "Identity of the run: adopting, resuming and stopping go by it. A DNS-1035 label, because pods carry it.",
        pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$",
        max_length=40,
    )
    workspace: str = placement_field(
        ".", "Local or mounted directory (path or file://) that holds datasets/<fingerprint> and runs/<id>."
    )
    seed: int = result_field(0, "Seed of weights, sample order and augmentation.", ge=0, lt=2**63)


class EvaluateSection(Section):
    batch: int = placement_field(256, "Images per rank and step.", ge=1)
    image_size: int | None = result_field(
        None, "Side of the evaluation image in pixels; default: that of the last training images.", ge=4
    )
    crop_fraction: float = result_field(0.875, "Centre crop side over resized short side.", gt=0, le=1)
    flip: bool = result_field(False, "Average the logits of each image and of its mirror image, at twice the cost.")
    every_epochs: float = result_field(1.0, "Evaluate during training this often; 0 = only at the end.", ge=0)
    weights: Literal["trained", "ema"] = result_field(
        "trained",
        "Which weights are the model: those of the last step, or their running average (train.ema). They are what "
        "accuracies and `target_top1` are of, and model.safetensors; the others are measured and written beside.",
    )
    models: tuple[str, ...] = result_field(
        (),
        "Evaluate these models together in place of the run's own: directories of runs or of models, or run ids of the "
        "same workspace. Default: where the document has an `ensemble`, its members.",
    )
    combine: Literal["probabilities", "logits", "weights"] = display_field(
        "probabilities",
        "Which way of combining several models the headline figures are of; all are computed: mean of the "
        "probabilities, mean of the logits, one model of the mean weights (Izmailov 2018).",
    )
    statistics_images: int = result_field(
        16384, "Training images over which batch norm's statistics of the mean weights are estimated anew.", ge=1
    )
    baseline: str | None = display_field(
        None, "A single model to set beside several, named as in `models`; at best one of as many epochs in all."
    )


class CheckpointSection(Section):
    every_epochs: float = placement_field(
        1.0, "Save this often, in epochs; 0 = only at the end and when stopped.", ge=0
    )
    every_steps: int = placement_field(0, "Save this often, in steps; 0 = by epochs alone.", ge=0)
    keep_last: int = placement_field(2, "Newest checkpoints kept.", ge=1)
    keep_best: int = placement_field(1, "Best checkpoints by validation top-1 kept besides.", ge=0)
    resume: str = placement_field(
        "auto", "`auto`: the newest complete checkpoint of this run; `never`: refuse to continue; or a directory."
    )
    snapshots: tuple[float, ...] = placement_field((), "Epochs whose states are saved and kept for good besides.")
    asynchronous: bool = placement_field(True, "Write while training goes on.")


class ClaimSection(Section):
    """Results of the published run; the report compares them with this run's."""

    top1: float | None = display_field(None, "Top-1 accuracy as a share.", ge=0, le=1)
    minutes: float | None = display_field(None, "Training time in minutes.", gt=0)
    images_per_second: float | None = display_field(None, "Training throughput over all devices.", gt=0)
    hardware: str | None = display_field(None, "What it ran on.")
    source: str | None = display_field(None, "Where it was published.")


class RunDocument(Section):
    """Fields of a run document, section by section, each checked by itself; `RunConfig` adds the checks across them."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    input: InputSection = InputSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    ensemble: EnsembleSection = EnsembleSection()
    checkpoint: CheckpointSection = CheckpointSection()
    telemetry: TelemetrySection = TelemetrySection()
    launch: LaunchSection = LaunchSection()
    claim: ClaimSection = ClaimSection()

    @property
    def eval_image_size(self) -> int:
        """Side of the evaluation image in pixels."""
        return self.evaluate.image_size or self.training_sizes[-1]

    @property
    def training_sizes(self) -> tuple[int, ...]:
        """Sides of the training images in pixels, in training order."""
        later = (phase.image_size for phase in self.train.phases if phase.image_size is not None)
        return (self.input.image_size, *later)
