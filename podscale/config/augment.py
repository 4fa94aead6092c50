"""The section about changes of colour and shape that each training image gets after its crop."""

from typing import Literal

from pydantic import model_validator

from podscale.config.conflict import conflict_error
from podscale.config.fields import result_field
from podscale.config.section import Section


class RandAugmentSection(Section):
    """Read where `policy` is rand_augment; the defaults are those of `rand-m6-mstd0.5-inc1` in timm's words."""

    magnitude: float = result_field(6.0, "Mean strength of an operation; 10 is the strongest.", ge=0, le=10)
    deviation: float = result_field(
        0.5, "Standard deviation of the strength, drawn anew for each operation and cut to 0 and 10.", ge=0
    )
    layers: int = result_field(2, "Operations that an image is offered, drawn with replacement.", ge=1, le=8)
    probability: float = result_field(0.5, "Probability that an operation offered is carried out.", gt=0, le=1)


class AugmentSection(Section):
    """Drawn from a stream keyed by (seed, epoch, sample key), like crops; carried out by the loader torchvision."""

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
        """Whether images are changed at all."""
        return self.policy != "none" or self.erase > 0

    @model_validator(mode="after")
    def _belongs(self) -> "AugmentSection":
        if self.policy != "rand_augment" and self.rand_augment != RandAugmentSection():
            raise conflict_error(
                "rand_augment",
                f"options of another policy than {self.policy}",
                hint="Set policy: rand_augment, or leave them out.",
            )
        return self
