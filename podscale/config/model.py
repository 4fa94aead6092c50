"""The run document: one frozen, typed model that says everything about a run.

Sections follow the stages. Each field names its class (see `fields`), its unit and its meaning; the JSON schema that
editors and the chart use is generated from here. Checks inside one section stand beside its fields; checks across
sections stand in `checks`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from podscale.config.augment import AugmentSection
from podscale.config.checks import check_sections
from podscale.config.conflict import conflict
from podscale.config.ema import EmaSection
from podscale.config.ensemble import EnsembleSection, StartSection, fill_cycles
from podscale.config.fields import display, placement, result
from podscale.config.launch import LaunchSection
from podscale.config.mixing import MixSection
from podscale.config.network import ModelSection
from podscale.config.optimizer import OptimizerSection
from podscale.config.recipe import fill_recipe
from podscale.config.schedule import CropSection, PhaseSection, ScheduleSection
from podscale.config.section import Section
from podscale.config.telemetry import TelemetrySection


class RunSection(Section):
    """Who this run is and where it lives."""

    id: str = placement(
        "run",
        "Identity of the run: adopting, resuming and stopping go by it. A DNS-1035 label, because pods carry it.",
        pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$",
        max_length=40,
    )
    workspace: str = placement(
        ".", "Local or mounted directory (path or file://) that holds datasets/<fingerprint> and runs/<id>."
    )
    seed: int = result(0, "Seed of weights, sample order and augmentation.", ge=0, lt=2**63)


class DataSection(Section):
    """What the shard set is made of; the shard stage sees this section alone."""

    source: str = result("digits", "Where the images are: `digits` (embedded), a path, or an fsspec URL.", min_length=1)
    format: Literal["auto", "digits", "imagefolder", "tar", "table", "imagenet"] = result(
        "auto", "Layout of the source; `auto` looks at it. `table` is a CSV or JSONL of path,label."
    )
    classes: tuple[str, ...] | None = result(
        None, "Expected class names in index order; a source with other classes is refused."
    )
    validation_fraction: float = result(0.2, "Share held out where the source brings no validation split.", gt=0, lt=1)
    stratify: bool = result(True, "Hold out the same share of every class instead of a plain hash split.")
    seed: int = result(0, "Seed of the held-out share and of the global pre-shuffle.", ge=0, lt=2**63)
    shard_bytes: int = result(256 * 2**20, "Aimed size of one shard in bytes.", ge=4096)
    min_shards: int = result(1, "At least this many shards per split (a multiple of the hosts that read them).", ge=1)
    policy: Literal["quarantine", "fail", "convert"] = result(
        "quarantine",
        "What to do with an unusable image: leave it out and list it, fail, or convert what can be converted.",
    )
    max_reject_rate: float = result(0.01, "Fail when more than this share of the images is unusable.", ge=0, le=1)
    dedup: Literal["report", "drop", "fail"] = result("report", "What to do with byte-identical images.")
    resize_short: int | None = result(None, "Re-encode to this short side in pixels (never enlarges).", ge=8)
    quality: int = result(90, "JPEG quality where an image is re-encoded.", ge=1, le=100)
    max_pixels: int = result(40_000_000, "Larger images are unusable (decompression bombs), in pixels.", ge=1)
    max_bytes: int = result(64 * 2**20, "Larger files are unusable, in bytes.", ge=1)


class InputSection(Section):
    """From shards to batches on the device."""

    loader: Literal["auto", "torchvision", "dali", "nvjpeg", "synthetic"] = placement(
        "auto",
        "Who decodes and crops; all follow the same order. `torchvision`: threads on the CPU, with the pixels of "
        "torchvision on PIL images; needs neither it nor torch. `auto`: that, but on GPUs dali where installed, else "
        "nvjpeg (torchvision's decoder on the GPU) where it works.",
    )
    image_size: int = result(224, "Side of the square training image in pixels.", ge=4)
    order: Literal["global", "blocked"] = result(
        "global", "`global`: one permutation of everything. `blocked`: fixed groups of shards, for host caches."
    )
    groups: int = result(1, "Number of shard groups of the blocked order; every host count must divide it.", ge=1)
    crop: CropSection = CropSection()
    augment: AugmentSection = AugmentSection()
    repeats: int = result(
        1,
        "Times that a sample comes in a row, each with draws of its own, on other ranks where there are as many "
        "(repeated augmentation; Hoffer 2020). An epoch still counts the images of the split, so that it sees one in "
        "so many of its samples.",
        ge=1,
    )
    mean: tuple[float, float, float] = result((0.485, 0.456, 0.406), "Mean per channel, of pixels scaled to [0, 1].")
    std: tuple[float, float, float] = result((0.229, 0.224, 0.225), "Deviation per channel, scaled to [0, 1].")
    max_bad_rate: float = result(0.001, "Fail when more than this share of records cannot be decoded.", ge=0, le=1)
    workers: int = placement(1, "Decoding threads or processes per rank.", ge=1)
    prefetch: int = placement(2, "Batches prepared ahead per rank.", ge=1)
    cache_dir: str | None = placement(None, "Node-local directory for remote shard sets; default: a temporary one.")
    cache_bytes: int = placement(256 * 2**30, "Size limit of the node-local shard cache in bytes.", ge=2**20)
    record_cache_bytes: int = placement(
        0,
        "Keep whole shards in the memory of each process, up to this many bytes: for shards behind a URL or on a slow "
        "volume. 0: none, local shards are kept by the kernel's page cache anyway.",
        ge=0,
    )
    decoded_cache_bytes: int = placement(
        0,
        "Keep decoded training images in the memory of each process, up to this many bytes (3 per pixel), with the "
        "loader torchvision. Pixels stay the same. 0: none.",
        ge=0,
    )


class AllReduceSection(Section):
    """How gradients are averaged over the ranks (docs/all-reduce.md)."""

    algorithm: Literal["auto", "flat", "ring", "tree", "hierarchical", "torus2d", "hybrid", "ddp"] = placement(
        "flat",
        "`auto`: measure the links when the run first starts, and choose algorithm and bucket_mb; kept with the run. "
        "`flat`: the backend's all-reduce on our buckets. `ring`: one ring through all ranks. `tree`: two binary "
        "trees. `hierarchical`: reduce in the row, ring of the rows' masters, broadcast. `torus2d`: reduce-scatter in "
        "the row, all-reduce in the column, all-gather in the row. `hybrid`: hierarchical for small buckets, ring for "
        "large ones. `ddp`: torch's DistributedDataParallel, as a baseline.",
    )
    row: int | None = placement(None, "Ranks in a row of the grid (fast links); default: the ranks of one node.", ge=1)
    bucket_mb: float = placement(25.0, "Size of one gradient bucket in MiB.", gt=0)
    overlap: bool = placement(True, "Reduce buckets while backward is still running.")
    wire_row: Literal["fp32", "bf16", "fp16"] = result("fp32", "Format of messages along the rows.")
    wire_column: Literal["fp32", "bf16", "fp16"] = result(
        "fp32", "Format of messages along the columns; of all messages of flat, ring and tree, which know no rows."
    )
    hybrid_mb: float = placement(
        8.0, "`hybrid`: buckets of fewer MiB go hierarchical (our value; the published threshold is not known).", ge=0
    )
    backend: Literal["auto", "nccl"] = placement(
        "auto", "`auto`: NCCL between GPUs, gloo between CPUs. `nccl`: refuse to run on CPUs."
    )

    @model_validator(mode="after")
    def _holds_together(self) -> "AllReduceSection":
        if self.bucket_mb * 2**20 < 4:
            raise conflict("bucket_mb", "smaller than one fp32 element (4 bytes)", got=self.bucket_mb)
        if self.wire_row != "fp32" and self.algorithm in ("flat", "ring", "tree"):
            raise conflict(
                "wire_row",
                f"{self.algorithm} has no rows",
                got=self.wire_row,
                hint="Set wire_column, the format of all it sends.",
            )
        if self.algorithm == "ddp" and (self.wire_row, self.wire_column) != ("fp32", "fp32"):
            raise conflict("wire_column", "ddp sends fp32", hint="Choose another algorithm for shorter messages.")
        return self


class TrainSection(Section):
    recipe: Literal["mlperf-lars"] | None = result(
        None,
        "Published settings for the global batch: fills in epochs, label smoothing, optimizer, schedule and batch-norm "
        "span where the document leaves them open.",
    )
    recipe_origin: str | None = display(None, "Written by the recipe: which published rows its values are from.")
    engine: Literal["pytorch", "jax"] = placement("pytorch", "Training engine: PyTorch on GPUs and CPUs, JAX on TPUs.")
    epochs: float = result(90.0, "Length of the run in passes over the training split.", gt=0)
    global_batch: int = result(256, "Images per update, over all ranks and accumulation steps.", ge=1)
    accumulation: int = placement(1, "Forward-backward passes per update.", ge=1)
    target_top1: float | None = result(
        None, "End the run with the evaluation that reaches this top-1 accuracy, as a share.", gt=0, lt=1
    )
    label_smoothing: float = result(0.1, "Mass of the target spread over all classes.", ge=0, lt=1)
    loss: Literal["cross_entropy", "binary_cross_entropy"] = result(
        "cross_entropy",
        "`binary_cross_entropy`: one yes or no for each class, the mean over images and classes (Wightman 2021).",
    )
    binary_threshold: float | None = result(
        None, "Binary cross entropy: targets above this count as 1, others as 0; default: as they are.", ge=0, lt=1
    )
    mix: MixSection = MixSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    ema: EmaSection = EmaSection()
    start_from: StartSection = StartSection()
    phases: tuple[PhaseSection, ...] = result(
        (),
        "Later parts of the run, each from an epoch on: `start` and what changes there (`schedule`, `momentum`, "
        "`reset_momentum`, `weight_decay`, `crop`, `image_size`). The part before the first is what the other options "
        "say.",
    )
    weight_update: Literal["replicated", "sharded"] = placement(
        "replicated",
        "`replicated`: every rank updates all weights. `sharded`: each updates its part and gathers the others' (Kumar "
        "2019); needs an all-reduce that stops half way.",
    )
    weight_gather: Literal["fp32", "bf16"] = result(
        "fp32",
        "Format in which a sharded update gathers weights. `bf16` halves the volume; the model then computes with "
        "rounded weights, batch norm's included, while the masters stay fp32.",
    )
    precision: Literal["fp32", "bf16", "bf16-pure", "fp16"] = result(
        "fp32",
        "Arithmetic of forward and backward. `bf16`, `fp16`: autocast, fp16 with a loss scale. `bf16-pure`: weights of "
        "convolutions and linear layers in bf16, rounded from fp32 masters after every update.",
    )
    loss_scale: float = result(65536.0, "Initial dynamic loss scale of fp16; above 1.", gt=0)
    channels_last: bool = placement(True, "Activations in NHWC memory order.")
    steps_per_call: int = placement(
        1,
        "Most updates that the devices carry out in one program, so that dispatching never binds (engine jax); fewer "
        "where an evaluation, a checkpoint or a line of the log comes between. On CPUs leave it at 1: XLA computes "
        "convolutions in a loop several times slower there.",
        ge=1,
    )
    stem_compute: Literal["plain", "padded4", "space_to_depth"] = placement(
        "plain",
        "How the first convolution is computed, with the same parameters and results: `padded4` with a fourth channel "
        "of zeros, `space_to_depth` with blocks of pixels folded into channels.",
    )
    spatial_partitions: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = placement(
        (1, 1),
        "Parts that each image is cut into along its height and its width (engine jax): so many devices share an image "
        "and count as one rank (Kumar 2019). For more cores than images.",
    )
    compile: Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = placement(
        "off", "Mode of torch.compile for forward and backward; the optimizer and the reduction stay as they are."
    )
    cuda_graph: bool = placement(
        False, "Record the whole update once, collectives and optimizer included, and replay it (GPU)."
    )
    all_reduce: AllReduceSection = AllReduceSection()
    max_nonfinite: int = result(10, "Fail after this many masked non-finite updates in a row.", ge=0)
    deterministic: bool = placement(False, "Ask the framework for deterministic kernels (GPU).")


class EvaluateSection(Section):
    batch: int = placement(256, "Images per rank and step.", ge=1)
    image_size: int | None = result(
        None, "Side of the evaluation image in pixels; default: that of the last training images.", ge=4
    )
    crop_fraction: float = result(0.875, "Centre crop side over resized short side.", gt=0, le=1)
    flip: bool = result(False, "Average the logits of each image and of its mirror image, at twice the cost.")
    every_epochs: float = result(1.0, "Evaluate during training this often; 0 = only at the end.", ge=0)
    weights: Literal["trained", "ema"] = result(
        "trained",
        "Which weights are the model: those of the last update, or their running average (train.ema). They are what "
        "accuracies and `target_top1` are of, and model.safetensors; the others are measured and written beside.",
    )
    models: tuple[str, ...] = result(
        (),
        "Evaluate these models together in place of the run's own: directories of runs or of models, or run ids of the "
        "same workspace. Default: where the document has an `ensemble`, its members.",
    )
    combine: Literal["probabilities", "logits", "weights"] = display(
        "probabilities",
        "Which way of combining several models the headline figures are of; all are computed: mean of the "
        "probabilities, mean of the logits, one model of the mean weights (Izmailov 2018).",
    )
    statistics_images: int = result(
        16384, "Training images over which batch norm's statistics of the mean weights are estimated anew.", ge=1
    )
    baseline: str | None = display(
        None, "A single model to set beside several, named as in `models`; at best one of as many epochs in all."
    )


class CheckpointSection(Section):
    every_epochs: float = placement(1.0, "Save this often, in epochs; 0 = only at the end and when stopped.", ge=0)
    every_steps: int = placement(0, "Save this often, in updates; 0 = by epochs alone.", ge=0)
    keep_last: int = placement(2, "Newest checkpoints kept.", ge=1)
    keep_best: int = placement(1, "Best checkpoints by validation top-1 kept besides.", ge=0)
    resume: str = placement(
        "auto", "`auto`: the newest complete checkpoint of this run; `never`: refuse to continue; or a directory."
    )
    snapshots: tuple[float, ...] = placement((), "Epochs whose states are saved and kept for good besides.")
    asynchronous: bool = placement(True, "Write while training goes on.")


class ClaimSection(Section):
    """What the published run reported; the report sets it beside what was achieved."""

    top1: float | None = display(None, "Top-1 accuracy as a share.", ge=0, le=1)
    minutes: float | None = display(None, "Training time in minutes.", gt=0)
    images_per_second: float | None = display(None, "Training throughput over all devices.", gt=0)
    hardware: str | None = display(None, "What it ran on.")
    source: str | None = display(None, "Where it was published.")


class RunConfig(Section):
    """One run, from images to report."""

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

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, values: Any) -> Any:
        return fill_cycles(fill_recipe(values))

    @model_validator(mode="after")
    def _sections_agree(self) -> "RunConfig":
        check_sections(self)
        return self

    @property
    def eval_image_size(self) -> int:
        """Side of the evaluation image in pixels."""
        return self.evaluate.image_size or self.training_sizes[-1]

    @property
    def training_sizes(self) -> tuple[int, ...]:
        """Sides of the training images in pixels, in the order in which the run comes to them."""
        later = (phase.image_size for phase in self.train.phases if phase.image_size is not None)
        return (self.input.image_size, *later)
