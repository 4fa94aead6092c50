"""Run document: its sections as fields, and the sections of the run itself.

The JSON schema for editors and the chart is generated from here. A section checks its own fields;
podscale.config.run_config has the checks across sections.
"""

from typing import Literal

from podscale.config.data import DataSection, InputSection
from podscale.config.ensemble import EnsembleSection
from podscale.config.export import ExportSection
from podscale.config.fields import Section, display_field, placement_field, result_field
from podscale.config.launch import LaunchSection
from podscale.config.model import ModelSection
from podscale.config.telemetry import TelemetrySection
from podscale.config.train import TrainSection


class RunSection(Section):
    """Identity and workspace of the run."""

    id: str = placement_field(
        "run",
        "Run id: commands find, resume and stop the run by it. At most 40 lower-case letters, digits and hyphens, "
        "starting with a letter, because pods carry it as a label.",
        pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$",
        max_length=40,
    )
    workspace: str = placement_field(
        ".", "Local or mounted directory (path or file://) that holds datasets/<fingerprint> and runs/<id>."
    )
    seed: int = result_field(0, "Seed of weights, sample order and augmentation.", ge=0, lt=2**63)
    code: str | None = result_field(
        None,
        "SHA-256 of the code in `launch.code`, recorded when the document is loaded.",
        pattern=r"^[0-9a-f]{64}$",
    )
    plugins: dict[str, str] = result_field(
        {},
        "Distribution and version of each plug-in that the document names, by `group:name`; recorded when the document "
        "is loaded. Set it for plug-ins that are installed in the image alone.",
    )


class EvaluateSection(Section):
    batch: int = placement_field(256, "Evaluation batch size, images per rank.", ge=1)
    image_size: int | None = result_field(
        None, "Side of the evaluation image in pixels; default: the last training size.", ge=4
    )
    crop_fraction: float = result_field(0.875, "Side of the centre crop over the resized short side.", gt=0, le=1)
    flip: bool = result_field(False, "Average the logits of each image and its mirror image, at twice the cost.")
    every_epochs: float = result_field(1.0, "Epochs between evaluations during training; 0 = only at the end.", ge=0)
    offset: float = result_field(
        0.0,
        "Epoch of the first evaluation during training; 0 = `every_epochs`. 1 with `every_epochs: 4` evaluates after "
        "epochs 1, 5, 9, ... (MLPerf).",
        ge=0,
    )
    weights: Literal["trained", "ema"] = result_field(
        "trained",
        "Weights of the final model: those of the last step, or their running average (train.ema). Accuracies, "
        "`target_top1` and model.safetensors are of these weights; the other weights are evaluated and written as "
        "well.",
    )
    models: tuple[str, ...] = result_field(
        (),
        "Evaluate these models together in place of the run's own: run or model directories, or run ids of the same "
        "workspace. Default: the members of the document's `ensemble`, if it has one.",
    )
    combine: Literal["probabilities", "logits", "weights"] = display_field(
        "probabilities",
        "Combination of several models that the headline figures are of: mean of the probabilities, mean of the "
        "logits, or one model of the mean weights (Izmailov 2018). All three are computed.",
    )
    statistics_images: int = result_field(
        16384, "Training images from which batch norm's statistics of the mean weights are computed.", ge=1
    )
    baseline: str | None = display_field(
        None,
        "Single model to compare several models with, named as in `models`; best is one trained for as many epochs in "
        "total.",
    )


class CheckpointSection(Section):
    every_epochs: float = placement_field(
        1.0, "Epochs between checkpoints; 0 = only at the end and when stopped.", ge=0
    )
    every_steps: int = placement_field(0, "Steps between checkpoints; 0 = by epochs alone.", ge=0)
    keep_last: int = placement_field(2, "Number of newest checkpoints to keep.", ge=1)
    keep_best: int = placement_field(1, "Number of best checkpoints by validation top-1 to keep as well.", ge=0)
    resume: str = placement_field(
        "auto",
        "`auto`: resume from the newest complete checkpoint of this run. `never`: refuse to continue. Else the "
        "directory to start from.",
    )
    snapshots: tuple[float, ...] = placement_field((), "Epochs at which a checkpoint is saved and kept for good.")
    asynchronous: bool = placement_field(True, "Write checkpoints while training goes on.")


class ClaimSection(Section):
    """Results of the published run; the report compares them with this run's."""

    top1: float | None = display_field(None, "Top-1 accuracy as a fraction.", ge=0, le=1)
    minutes: float | None = display_field(None, "Training time in minutes.", gt=0)
    images_per_second: float | None = display_field(None, "Training throughput over all devices.", gt=0)
    hardware: str | None = display_field(None, "Hardware it ran on.")
    source: str | None = display_field(None, "Publication.")


class RunDocument(Section):
    """Fields of a run document, section by section, each checked by itself; `RunConfig` adds the checks across them."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    input: InputSection = InputSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    ensemble: EnsembleSection = EnsembleSection()
    export: ExportSection = ExportSection()
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
