"""The section about mixing the images of a batch with each other."""

from podscale.config.fields import result_field
from podscale.config.section import Section


class MixSection(Section):
    """Training images mixed in pairs, and their targets with them; where both ways are asked for, one or the other.

    Drawn anew for each update and rank, keyed by (seed, update, rank), so that a resumed run draws the same.
    """

    mixup: float = result_field(
        0.0,
        "Add two images, weighted by a draw from Beta(mixup, mixup) and its complement (Zhang 2017). 0 = do not.",
        ge=0,
        le=1,
    )
    cutmix: float = result_field(
        0.0,
        "Put a rectangle of one image into the other; the share that it leaves is drawn from Beta(cutmix, cutmix) "
        "(Yun 2019). 0 = do not.",
        ge=0,
        le=1,
    )

    @property
    def is_enabled(self) -> bool:
        """Whether images are mixed at all."""
        return self.mixup > 0 or self.cutmix > 0
