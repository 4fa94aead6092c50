"""Data, input and augmentation sections: source of the shard set, and the input pipeline from shards to batches."""

from typing import Literal

from pydantic import model_validator

from podscale.config.fields import Section, conflict_error, placement_field, result_field
from podscale.config.schedule import CropSection


class RandAugmentSection(Section):
    """Options of the policy rand_augment; the defaults are those of `rand-m6-mstd0.5-inc1` in timm."""

    magnitude: float = result_field(6.0, "Mean strength of an operation; 10 is the strongest.", ge=0, le=10)
    deviation: float = result_field(
        0.5, "Standard deviation of the strength, drawn anew for each operation and cut to 0 and 10.", ge=0
    )
    layers: int = result_field(2, "Operations that an image is offered, drawn with replacement.", ge=1, le=8)
    probability: float = result_field(0.5, "Probability that an operation offered is carried out.", gt=0, le=1)


class AugmentSection(Section):
    """Augmentation of cropped images by the loader torchvision, keyed like crops by (seed, epoch, sample key)."""

    policy: Literal["none", "rand_augment", "trivial_augment"] = result_field(
        "none",
        "Operations on the cropped image. `rand_augment`: some of 15 at one strength (Cubuk 2019, in timm's form). "
        "`trivial_augment`: one of 14 at a random strength (Mueller 2021, torchvision's TrivialAugmentWide).",
    )
    rand_augment: RandAugmentSection = RandAugmentSection()
    erase: float = result_field(
        0.0,
        "Probability that a rectangle of the image, 2 to 33 % of it, is replaced by the mean colour (Zhong 2017).",
        ge=0,
        le=1,
    )

    @property
    def is_enabled(self) -> bool:
        """Return whether any augmentation is on."""
        return self.policy != "none" or self.erase > 0

    @model_validator(mode="after")
    def _check_policy(self) -> "AugmentSection":
        if self.policy != "rand_augment" and self.rand_augment != RandAugmentSection():
            raise conflict_error(
                "rand_augment",
                f"options of another policy than {self.policy}",
                hint="Set policy: rand_augment, or leave them out.",
            )
        return self


class DataSection(Section):
    """Contents of the shard set. The shard stage reads this section alone."""

    source: str = result_field(
        "digits", "Where the images are: `digits` (embedded), a path, or an fsspec URL.", min_length=1
    )
    format: Literal["auto", "digits", "imagefolder", "tar", "table", "imagenet"] = result_field(
        "auto", "Layout of the source; `auto` looks at it. `table` is a CSV or JSONL of path,label."
    )
    classes: tuple[str, ...] | None = result_field(
        None, "Expected class names in index order; a source with other classes is refused."
    )
    validation_fraction: float = result_field(
        0.2, "Share held out where the source brings no validation split.", gt=0, lt=1
    )
    stratify: bool = result_field(True, "Hold out the same share of every class instead of a plain hash split.")
    seed: int = result_field(0, "Seed of the held-out share and of the global pre-shuffle.", ge=0, lt=2**63)
    shard_bytes: int = result_field(256 * 2**20, "Aimed size of one shard in bytes.", ge=4096)
    min_shards: int = result_field(
        1, "At least this many shards per split (a multiple of the hosts that read them).", ge=1
    )
    policy: Literal["quarantine", "fail", "convert"] = result_field(
        "quarantine",
        "What to do with an unusable image: leave it out and list it, fail, or convert what can be converted.",
    )
    max_reject_rate: float = result_field(0.01, "Fail when more than this share of the images is unusable.", ge=0, le=1)
    dedup: Literal["report", "drop", "fail"] = result_field("report", "What to do with byte-identical images.")
    resize_short: int | None = result_field(None, "Re-encode to this short side in pixels (never enlarges).", ge=8)
    quality: int = result_field(90, "JPEG quality where an image is re-encoded.", ge=1, le=100)
    max_pixels: int = result_field(40_000_000, "Larger images are unusable (decompression bombs), in pixels.", ge=1)
    max_bytes: int = result_field(64 * 2**20, "Larger files are unusable, in bytes.", ge=1)


class InputSection(Section):
    """From shards to batches on the device."""

    loader: Literal["auto", "torchvision", "dali", "nvjpeg", "synthetic"] = placement_field(
        "auto",
        "Who decodes and crops; all follow the same order. `torchvision`: threads on the CPU, with the pixels of "
        "torchvision on PIL images; needs neither it nor torch. `auto`: that, but on GPUs dali where installed, else "
        "nvjpeg (torchvision's decoder on the GPU) where it works.",
    )
    image_size: int = result_field(224, "Side of the square training image in pixels.", ge=4)
    order: Literal["global", "blocked"] = result_field(
        "global", "`global`: one permutation of everything. `blocked`: fixed groups of shards, for host caches."
    )
    groups: int = result_field(1, "Number of shard groups of the blocked order; every host count must divide it.", ge=1)
    crop: CropSection = CropSection()
    augment: AugmentSection = AugmentSection()
    repeats: int = result_field(
        1,
        "Times that a sample comes in a row, each with draws of its own, on other ranks where there are as many "
        "(repeated augmentation; Hoffer 2020). An epoch still counts the images of the split, so that it sees one in "
        "so many of its samples.",
        ge=1,
    )
    mean: tuple[float, float, float] = result_field(
        (0.485, 0.456, 0.406), "Mean per channel, of pixels scaled to [0, 1]."
    )
    std: tuple[float, float, float] = result_field((0.229, 0.224, 0.225), "Deviation per channel, scaled to [0, 1].")
    max_bad_rate: float = result_field(
        0.001, "Fail when more than this share of records cannot be decoded.", ge=0, le=1
    )
    workers: int = placement_field(1, "Decoding threads or processes per rank.", ge=1)
    prefetch: int = placement_field(2, "Batches prepared ahead per rank.", ge=1)
    cache_dir: str | None = placement_field(
        None, "Node-local directory for remote shard sets; default: a temporary one."
    )
    cache_bytes: int = placement_field(256 * 2**30, "Size limit of the node-local shard cache in bytes.", ge=2**20)
    record_cache_bytes: int = placement_field(
        0,
        "Keep whole shards in the memory of each process, up to this many bytes: for shards behind a URL or on a slow "
        "volume. 0: none, local shards are kept by the kernel's page cache anyway.",
        ge=0,
    )
    decoded_cache_bytes: int = placement_field(
        0,
        "Keep decoded training images in the memory of each process, up to this many bytes (3 per pixel), with the "
        "loader torchvision. Pixels stay the same. 0: none.",
        ge=0,
    )
