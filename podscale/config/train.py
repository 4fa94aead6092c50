"""Train section, with the all-reduce of the gradients, Mixup and CutMix."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from podscale.config.fields import Section, conflict_error, display_field, placement_field, result_field
from podscale.config.optimizer import EmaSection, OptimizerSection
from podscale.config.schedule import PhaseSection, ScheduleSection
from podscale.config.start import StartSection


class MixSection(Section):
    """Mixup and CutMix of pairs of training images and their targets; if both are on, each step draws one of them.

    Draws are keyed by (seed, step, rank), so a resumed run repeats them.
    """

    mixup: float = result_field(
        0.0,
        "Mixup: the weights of the two images are a draw from Beta(mixup, mixup) and its complement (Zhang 2017). 0 = "
        "off.",
        ge=0,
        le=1,
    )
    cutmix: float = result_field(
        0.0,
        "CutMix: a rectangle of one image replaces that of another; the fraction of the image that stays is drawn "
        "from Beta(cutmix, cutmix) (Yun 2019). 0 = off.",
        ge=0,
        le=1,
    )

    @property
    def is_enabled(self) -> bool:
        """Return True if images are mixed."""
        return self.mixup > 0 or self.cutmix > 0


WireFormatName = Literal["fp32", "bf16", "fp16", "int8"]


class AllReduceSection(Section):
    """All-reduce of the gradients (docs/explanation/all-reduce.md)."""

    algorithm: Literal["auto", "flat", "ring", "tree", "hierarchical", "torus2d", "hybrid", "ddp"] = placement_field(
        "flat",
        "`auto`: measure the links at the first start of the run, choose algorithm and bucket_mb, and keep them for "
        "the run. `flat`: the backend's all-reduce on our buckets. `ring`: one ring through all ranks. `tree`: two "
        "binary trees. `hierarchical`: reduce in the row, ring of the rows' masters, broadcast. `torus2d`: "
        "reduce-scatter in the row, all-reduce in the column, all-gather in the row. `hybrid`: hierarchical for small "
        "buckets, ring for large ones. `ddp`: PyTorch's DistributedDataParallel, as a baseline.",
    )
    row: int | None = placement_field(
        None, "Ranks per row of the grid (fast links); default: the ranks of one node.", ge=1
    )
    shard_over: Literal["row", "world"] = placement_field(
        "row",
        "Ranks that divide a sharded weight update. `row`: those of a row of torus2d; flat and ring have no rows and "
        "divide it over all ranks. `world`: all ranks, with torus2d too, whose columns then reduce-scatter.",
    )
    bucket_mb: float = placement_field(25.0, "Size of one gradient bucket, MiB.", gt=0)
    overlap: bool = placement_field(True, "Reduce buckets during the backward pass.")
    wire_row: WireFormatName = result_field(
        "fp32",
        "Number format of messages along the rows. `int8`: one byte per value, and a scale for each block of 256.",
    )
    wire_column: WireFormatName = result_field(
        "fp32",
        "Number format of messages along the columns; of all messages of flat, ring and tree, which have no rows.",
    )
    hybrid_mb: float = placement_field(
        8.0,
        "`hybrid`: buckets below this size, MiB, use hierarchical (our value; the published threshold is not known).",
        ge=0,
    )
    backend: Literal["auto", "nccl"] = placement_field(
        "auto", "Communication backend. `auto`: NCCL between GPUs, gloo between CPUs. `nccl`: refuse to run on CPUs."
    )

    @property
    def sends_int8(self) -> bool:
        """Return True if messages along an axis are int8, with a scale for each block of values."""
        return "int8" in (self.wire_row, self.wire_column)

    @model_validator(mode="after")
    def _check_all_reduce(self) -> "AllReduceSection":
        if self.bucket_mb * 2**20 < 4:
            raise conflict_error("bucket_mb", "smaller than one fp32 element (4 bytes)", got=self.bucket_mb)
        if self.wire_row != "fp32" and self.algorithm in ("flat", "ring", "tree"):
            raise conflict_error(
                "wire_row",
                f"{self.algorithm} has no rows",
                got=self.wire_row,
                hint="Set wire_column, the format of all its messages.",
            )
        if self.algorithm == "ddp" and (self.wire_row, self.wire_column) != ("fp32", "fp32"):
            raise conflict_error("wire_column", "ddp sends fp32", hint="Choose another algorithm.")
        return self


class TrainSection(Section):
    recipe: Literal["mlperf-lars"] | None = result_field(
        None,
        "Published settings for the global batch. Fills in epochs, label smoothing, optimizer, schedule and "
        "batch-norm span if the document leaves them open.",
    )
    recipe_origin: str | None = display_field(
        None, "Published results that the values of `train.recipe` come from; the recipe fills this in."
    )
    engine: Literal["pytorch", "jax"] = placement_field(
        "pytorch", "Training engine: PyTorch on GPUs and CPUs, JAX on TPUs."
    )
    epochs: float = result_field(90.0, "Length of the run, epochs (passes over the training split).", gt=0)
    global_batch: int = result_field(
        256,
        "Global batch size, images (over all ranks and accumulation passes); `phases` may change it.",
        ge=1,
    )
    accumulation: int = placement_field(1, "Gradient accumulation: forward-backward passes per step.", ge=1)
    target_top1: float | None = result_field(
        None, "End the run at the evaluation that reaches this top-1 accuracy, as a fraction.", gt=0, lt=1
    )
    label_smoothing: float = result_field(
        0.1, "Label smoothing: probability mass of the target spread over all classes.", ge=0, lt=1
    )
    loss: Literal["cross_entropy", "binary_cross_entropy"] = result_field(
        "cross_entropy",
        "Training loss. `binary_cross_entropy`: one binary decision per class, averaged over images and classes "
        "(Wightman 2021).",
    )
    binary_threshold: float | None = result_field(
        None,
        "Binary cross entropy: targets above this count as 1, others as 0; default: targets are used as they are.",
        ge=0,
        lt=1,
    )
    mix: MixSection = MixSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    ema: EmaSection = EmaSection()
    start_from: StartSection = StartSection()
    start_from_strict: bool = result_field(
        True,
        "Refuse initial weights that lack arrays of the model, have others, or have other shapes. If false, what does "
        "not fit is left out, and the model's own initial values stay.",
    )
    head: Literal["keep", "replace", "auto"] = result_field(
        "auto",
        "Classifier of a run that starts from weights. `keep`: the loaded one. `replace`: a new one. `auto`: a new one "
        "if the classes differ, or, for weights without a list of classes, their number.",
    )
    freeze: tuple[str, ...] = result_field(
        (),
        "Parameters that are not trained, by name or pattern, such as `layer1.*`. A pattern after `!` is excepted; "
        "`head` stands for the classifier: [`*`, `!head`] trains the classifier alone.",
    )
    freeze_batch_norm: bool = result_field(
        False,
        "Batch norm with frozen parameters uses its running statistics and does not change them, as in evaluation.",
    )
    learning_rate_scale: dict[str, Annotated[float, Field(ge=0)]] = result_field(
        {},
        "Factors of the learning rate (and of decoupled weight decay) by name or pattern of parameters; `head` stands "
        "for the classifier. The last pattern that matches counts.",
    )
    layer_decay: float | None = result_field(
        None,
        "Layer-wise decay: the learning rate of each block of the model is this factor times that of the next one; "
        "the classifier has the full one. `learning_rate_scale` multiplies it.",
        gt=0,
        le=1,
    )
    phases: tuple[PhaseSection, ...] = result_field(
        (),
        "Later parts of the run: the epoch at which each begins (`start`) and the options that change there "
        "(`schedule`, `global_batch`, `accumulation`, `momentum`, `reset_momentum`, `weight_decay`, "
        "`batch_norm_momentum`, `crop`, `image_size`). Until the first phase begins, the options outside of `phases` "
        "apply.",
    )
    weight_update: Literal["replicated", "sharded"] = placement_field(
        "replicated",
        "`replicated`: every rank updates all weights. `sharded`: each rank updates its part and gathers the others "
        "(Kumar 2019); needs an all-reduce with a reduce-scatter (flat, ring, torus2d). `all_reduce.shard_over` sets "
        "the ranks that divide it.",
    )
    weight_gather: Literal["fp32", "bf16"] = result_field(
        "fp32",
        "Number format in which a sharded update gathers weights. `bf16` halves the volume; the model then computes "
        "with rounded weights, batch norm's included, and the master weights stay fp32.",
    )
    precision: Literal["fp32", "bf16", "bf16-pure", "fp16"] = result_field(
        "fp32",
        "Precision of forward and backward. `bf16`, `fp16`: autocast, fp16 with a loss scale. `bf16-pure`: weights of "
        "convolutions and linear layers in bf16, rounded from fp32 master weights after every step.",
    )
    loss_scale: float = result_field(65536.0, "Initial value of fp16's dynamic loss scale; above 1.", gt=0)
    channels_last: bool = placement_field(True, "Activations in NHWC memory order.")
    steps_per_call: int = placement_field(
        1,
        "Maximum number of steps in one call of the compiled program (engine jax); more steps hide the time that the "
        "host needs to start a call. An evaluation, a checkpoint or a log line ends a call. Leave it at 1 on CPUs: XLA "
        "computes convolutions in a loop several times slower there.",
        ge=1,
    )
    stem_compute: Literal["plain", "padded4", "space_to_depth"] = placement_field(
        "plain",
        "Computation of the first convolution, with the same parameters and results: `padded4` with a fourth channel "
        "of zeros, `space_to_depth` with blocks of pixels folded into channels.",
    )
    spatial_partitions: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = placement_field(
        (1, 1),
        "Parts that each image is cut into along its height and its width (engine jax). The devices that share an "
        "image count as one rank (Kumar 2019). Useful if the devices outnumber the images of a batch.",
    )
    compile: Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        placement_field(
            "off", "Mode of torch.compile for forward and backward; the optimizer and the all-reduce are not compiled."
        )
    )
    fused_kernels: Literal["off", "norm", "gemm", "auto"] = placement_field(
        "off",
        "Triton kernels in eager steps with channels_last (GPU). norm: for batch norm with ReLU, the sum of a residual "
        "block and the pooling of the stem, if Triton can compile. gemm: also for the 1x1 convolutions of bottleneck "
        "blocks in bf16 and fp16, with the batch norms around them. auto: the fastest of the three, timed at the start "
        "of a run. Equal to separate operations up to rounding. They have not run on a GPU yet.",
    )
    cuda_graph: bool = placement_field(
        False, "Capture the whole step, collectives and optimizer included, as a CUDA graph and replay it (GPU)."
    )
    all_reduce: AllReduceSection = AllReduceSection()
    max_nonfinite: int = result_field(
        10,
        "Tolerated number of consecutive steps with a non-finite loss or gradient; one more fails the run. Such a step "
        "is masked: it changes no weight.",
        ge=0,
    )
    deterministic: bool = placement_field(False, "Request deterministic kernels from the framework (GPU).")
