"""Data, input and augmentation sections: source of the shard set, and the input pipeline from shards to batches."""

from typing import Annotated, Literal

from pydantic import JsonValue, WithJsonSchema, field_validator, model_validator

from podscale.config.fields import (
    PLUGINS,
    Section,
    check_choice,
    check_plugin_options,
    choice_schema,
    conflict_error,
    placement_field,
    result_field,
)
from podscale.config.schedule import CropSection
from podscale.util.plugins import plugin_name

Interpolation = Literal["bilinear", "bicubic"]
"""Filter that resizes images, antialiased as in Pillow."""


AUGMENT_POLICIES = ("none", "rand_augment", "trivial_augment")
FORMATS = ("auto", "digits", "imagefolder", "tar", "table", "imagenet")


class RandAugmentSection(Section):
    """Options of the policy rand_augment; the defaults are those of `rand-m6-mstd0.5-inc1` in timm."""

    magnitude: float = result_field(6.0, "Mean strength of an operation; 10 is the strongest.", ge=0, le=10)
    deviation: float = result_field(
        0.5, "Standard deviation of the strength, which is drawn for each operation and clipped to [0, 10].", ge=0
    )
    layers: int = result_field(2, "Operations drawn for each image, with replacement.", ge=1, le=8)
    probability: float = result_field(0.5, "Probability that a drawn operation is applied.", gt=0, le=1)


class AugmentSection(Section):
    """Augmentation of cropped images by the loaders native and reference; draws are keyed by (seed, epoch, key)."""

    policy: Annotated[str, WithJsonSchema(choice_schema(AUGMENT_POLICIES))] = result_field(
        "none",
        "Augmentation of the cropped image. `rand_augment`: some of 15 operations at one strength (Cubuk 2019, in "
        "timm's form). `trivial_augment`: one of 14 at a random strength (Mueller 2021, torchvision's "
        "TrivialAugmentWide). `plugin:NAME`: of an installed plug-in; `python:MODULE:CALLABLE`: of your own code.",
    )
    options: dict[str, JsonValue] = result_field({}, "Options of the augmentation of a plug-in or of your own code.")
    rand_augment: RandAugmentSection = RandAugmentSection()
    erase: float = result_field(
        0.0,
        "Probability of replacing a rectangle, 2 to 33 % of the image, by the mean colour (Zhong 2017).",
        ge=0,
        le=1,
    )

    @property
    def is_enabled(self) -> bool:
        """Return True if any augmentation is on."""
        return self.policy != "none" or self.erase > 0

    @model_validator(mode="after")
    def _check_policy(self) -> "AugmentSection":
        check_choice("policy", self.policy, AUGMENT_POLICIES)
        check_plugin_options(self.policy, self.options)
        if self.policy != "rand_augment" and self.rand_augment != RandAugmentSection():
            raise conflict_error(
                "rand_augment",
                f"only for the policy rand_augment, and policy is {self.policy}",
                hint="Set policy: rand_augment, or leave them out.",
            )
        return self


class DataSection(Section):
    """Contents of the shard set. The shard stage reads only this section."""

    source: str = result_field(
        "digits", "Source of the images: `digits` (embedded), a path, or an fsspec URL.", min_length=1
    )
    format: Annotated[str, WithJsonSchema(choice_schema(FORMATS, PLUGINS))] = result_field(
        "auto",
        "Layout of the source; `auto` detects it. `table` is a CSV or JSONL of path,label. `plugin:NAME`: a source "
        "of an installed plug-in.",
    )
    classes: tuple[str, ...] | None = result_field(
        None, "Expected class names in index order; a source with other classes is refused."
    )
    only_classes: tuple[str, ...] | None = result_field(
        None,
        "Classes of the source to use, in any order; images of the others are left out. Their indices are those of the "
        "sorted names, or of `classes`. Default: all.",
    )
    images_per_class: int | None = result_field(
        None,
        "Maximum number of training images of each class, chosen by a hash of name and `seed`. The validation split "
        "keeps all of its images. Default: all.",
        ge=1,
    )
    validation_fraction: float = result_field(
        0.2, "Fraction of the images held out for validation if the source has no validation split.", gt=0, lt=1
    )
    holdout_fraction: float | None = result_field(
        None,
        "Fraction of the training images that become the validation split, instead of the source's validation images, "
        "which are left out. For choosing options by other images than those of the final evaluation.",
        gt=0,
        lt=1,
    )
    stratify: bool = result_field(True, "Hold out the same fraction of every class instead of a plain hash split.")
    seed: int = result_field(0, "Seed of the held-out fraction and of the global pre-shuffle.", ge=0, lt=2**63)
    shard_bytes: int = result_field(256 * 2**20, "Target size of one shard, bytes.", ge=4096)
    min_shards: int = result_field(
        1, "Minimal number of shards per split; a multiple of the number of hosts that read them.", ge=1
    )
    policy: Literal["quarantine", "fail", "convert"] = result_field(
        "quarantine",
        "Policy for unusable images: `quarantine` leaves them out and lists them, `convert` converts those that can "
        "be converted, `fail` ends the stage.",
    )
    max_reject_rate: float = result_field(
        0.01, "Fail if more than this fraction of the images is unusable.", ge=0, le=1
    )
    dedup: Literal["report", "drop", "fail"] = result_field(
        "report", "Policy for byte-identical images: `report` them, `drop` all but the first, or `fail`."
    )
    resize_short: int | None = result_field(None, "Re-encode images to this short side, pixels; never enlarges.", ge=8)
    quality: int = result_field(90, "JPEG quality of re-encoded images.", ge=1, le=100)
    decode_index: int | None = placement_field(
        8,
        "MCUs between two entries of the decode index, with which the loader native decodes crops faster; more for an "
        "image whose index would have more than 3 % of the image's bytes. It changes no pixels. null: none.",
        ge=1,
        le=4096,
    )
    max_pixels: int = result_field(40_000_000, "Images of more pixels are unusable (decompression bombs).", ge=1)
    max_bytes: int = result_field(64 * 2**20, "Image files of more bytes are unusable.", ge=1)

    @property
    def source_is_location(self) -> bool:
        """Return True if `source` is a path or URL; False for the digits and for a plug-in, which reads it itself."""
        return self.source != "digits" and plugin_name(self.format) is None

    @model_validator(mode="after")
    def _check_format(self) -> "DataSection":
        check_choice("format", self.format, FORMATS, PLUGINS)
        return self

    @model_validator(mode="after")
    def _check_only_classes(self) -> "DataSection":
        names = self.only_classes
        if names is None:
            return self
        if len(set(names)) < len(names):
            raise conflict_error("only_classes", "a class is named twice", got=list(names))
        if len(names) < 2:
            raise conflict_error("only_classes", "a classifier needs at least two classes", got=list(names))
        if self.classes is not None and set(self.classes) != set(names):
            problem = "these are not the classes of data.classes"
            raise conflict_error("only_classes", problem, got=list(names), hint="Leave data.classes out.")
        return self


class InputSection(Section):
    """Input pipeline, from shards to batches on the device."""

    loader: Literal["auto", "native", "reference", "dali", "nvjpeg", "synthetic"] = placement_field(
        "auto",
        "Loader that decodes and crops; the order of the samples is the same for all. `native`: CPU threads of "
        "Podscale's extension, with Pillow's pixels; without the extension, reference. `reference`: CPU threads with "
        "Pillow, the same pixels. `auto`: native; on GPUs dali if installed, else nvjpeg (torchvision's decoder on the "
        "GPU) if it works. `torchvision`, of earlier versions, is another name of reference.",
    )
    image_size: int = result_field(224, "Side of the square training image in pixels.", ge=4)
    order: Literal["global", "blocked"] = result_field(
        "global",
        "Order of the samples. `global`: one permutation of the whole split. `blocked`: fixed groups of shards, for "
        "host caches.",
    )
    groups: int = result_field(1, "Shard groups of the blocked order; every number of hosts must divide it.", ge=1)
    interpolation: Literal["bilinear", "bicubic", "random"] = result_field(
        "bilinear",
        "Filter that resizes images, in training and in evaluation; antialiased, as in Pillow. `bicubic` is Keys' with "
        "a = -0.5. `random`: one of the two for each training crop, drawn by (seed, epoch, sample), with the loaders "
        "native and reference; bicubic in evaluation.",
    )
    crop: CropSection = CropSection()
    augment: AugmentSection = AugmentSection()
    repeats: int = result_field(
        1,
        "Copies of each sample in a row, each augmented by draws of its own, on different ranks if there are enough "
        "(repeated augmentation; Hoffer 2020). The length of an epoch stays the same, so an epoch sees 1/repeats of "
        "the samples.",
        ge=1,
    )
    mean: tuple[float, float, float] = result_field(
        (0.485, 0.456, 0.406), "Mean per channel, of pixels scaled to [0, 1]."
    )
    std: tuple[float, float, float] = result_field(
        (0.229, 0.224, 0.225), "Standard deviation per channel, of pixels scaled to [0, 1]."
    )
    per_image_standardization: bool = result_field(
        False,
        "Standardise each image by its own mean and deviation over pixels and channels, in training and in evaluation, "
        "in place of `mean` and `std`. The deviation is that of pixels from 0 to 255, at least 1 / sqrt(number of "
        "values), as in tf.image.per_image_standardization.",
    )
    max_bad_rate: float = result_field(
        0.001, "Fail if more than this fraction of the records cannot be decoded.", ge=0, le=1
    )
    workers: int = placement_field(1, "Decoding threads or processes per rank.", ge=1)
    prefetch: int = placement_field(2, "Batches prefetched per rank.", ge=1)
    cache_dir: str | None = placement_field(
        None, "Node-local cache directory for remote shard sets; default: a temporary one."
    )
    cache_bytes: int = placement_field(256 * 2**30, "Size limit of the node-local shard cache, bytes.", ge=2**20)
    record_cache_bytes: int = placement_field(
        0,
        "Memory per process for whole shards, bytes; for shards behind a URL or on a slow volume. 0 = none: the "
        "kernel's page cache keeps local shards anyway.",
        ge=0,
    )
    decoded_cache_bytes: int = placement_field(
        0,
        "Memory per process for decoded training images, bytes, with the loaders native and reference. The processes "
        "of a node share it, so an image is kept once. Pixels stay the same. 0 = none.",
        ge=0,
    )
    decoded_cache_form: Literal["auto", "pixels", "coefficients"] = placement_field(
        "auto",
        "Form of the images in the decoded cache. `pixels`: 3 bytes a pixel, the fastest to crop. `coefficients`: DCT "
        "coefficients of JPEGs, about twice the bytes of the file, only with the loader native. `auto`: the form with "
        "the higher rate, measured on a few images at the start. Pixels of crops stay the same.",
    )

    @property
    def eval_interpolation(self) -> Interpolation:
        """Filter in evaluation and prediction."""
        return "bicubic" if self.interpolation == "random" else self.interpolation

    @property
    def needs_cpu_loader(self) -> bool:
        """Return True if only the loaders on CPUs have these options."""
        return self.augment.is_enabled or self.interpolation == "random"

    @field_validator("loader", mode="before")
    @classmethod
    def _rename_loader(cls, value: object) -> object:
        """Accept the earlier name of the reference loader, so that runs of earlier versions resume."""
        return "reference" if value == "torchvision" else value
