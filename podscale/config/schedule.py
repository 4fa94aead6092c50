"""Schedule and phase sections: learning rate, momentum and image size over the course of a run."""

from typing import Literal

from pydantic import model_validator

from podscale.config.fields import Section, conflict_error, placement_field, result_field


class CropSection(Section):
    """Random crop of training images, keyed by (seed, epoch, sample key)."""

    scale: tuple[float, float] = result_field(
        (0.08, 1.0), "Range of a random crop's area, as a fraction of the image's."
    )
    ratio: tuple[float, float] = result_field((3 / 4, 4 / 3), "Range of a random crop's aspect ratio (width / height).")
    flip: float = result_field(0.5, "Probability of a horizontal flip.", ge=0, le=1)
    short_side: float | None = result_field(
        None,
        "Instead of a random scale and ratio: a square crop, anywhere in the image, whose side is this fraction of "
        "the image's short side; 0.875 is a crop of 224 from a short side of 256.",
        gt=0,
        le=1,
    )
    padding: int | None = result_field(
        None,
        "Instead of a random scale and ratio: resize the short side to the image size, add this many black pixels on "
        "each side, and crop a square at random; 4 is usual for CIFAR (He 2015, section 4.2).",
        ge=0,
    )

    @model_validator(mode="after")
    def _check_padding(self) -> "CropSection":
        if self.padding is None:
            return self
        others = CropSection.model_fields
        for name in ("scale", "ratio", "short_side"):
            if (value := getattr(self, name)) != others[name].default:
                raise conflict_error(
                    "padding",
                    f"such a crop has a fixed size, and {name} sets another one",
                    got=self.padding,
                    hint=f"Leave out padding or {name} (got {value}).",
                )
        return self

    @model_validator(mode="after")
    def _check_ranges(self) -> "CropSection":
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high:
                raise conflict_error(name, "needs 0 < low <= high", got=[low, high])
        if self.scale[1] > 1:
            raise conflict_error("scale", "a crop cannot keep more than the whole image", got=self.scale[1])
        return self


class ScheduleSection(Section):
    name: Literal["cosine", "step", "polynomial", "constant"] = result_field("cosine", "Decay after the warm-up.")
    learning_rate: float = result_field(
        0.1, "Peak learning rate, for the whole global batch; it is not multiplied by the number of ranks.", gt=0
    )
    warmup_epochs: float = result_field(0.0, "Length of the warm-up, epochs.", ge=0)
    warmup_start: float = result_field(0.0, "Learning rate at step 0 of the warm-up.", ge=0)
    warmup_power: float = result_field(
        1.0,
        "Exponent of the warm-up: the rate rises with this power of the warm-up's elapsed fraction. 1 is linear; 0.5 "
        "rises fastest at the start (Adya 2018).",
        gt=0,
    )
    end_learning_rate: float = result_field(0.0, "Learning rate at the end of cosine and polynomial decay.", ge=0)
    power: float = result_field(2.0, "Exponent of the polynomial decay.", gt=0)
    milestones: tuple[float, ...] = result_field((30.0, 60.0, 80.0), "Epochs at which the step schedule decays.")
    gamma: float = result_field(0.1, "Factor of the step schedule at each milestone.", gt=0, lt=1)
    decay_from: Literal["warmup", "start"] = result_field(
        "warmup",
        "Start of cosine and polynomial decay. `warmup`: the end of the warm-up. `start`: the start of the schedule, "
        "so that the rate has already decayed when the warm-up ends (Codreanu 2017).",
    )
    decay_epochs: float | None = result_field(
        None,
        "Length of cosine and polynomial decay in epochs; default: to the end of the schedule. A longer decay is cut "
        "off there (the poly_cyc of Codreanu 2017).",
        gt=0,
    )
    momentum_start: float | None = result_field(
        None, "Momentum at step 0 of the warm-up; it changes linearly to the phase's momentum.", ge=0, lt=1
    )
    momentum_end: float | None = result_field(
        None, "Momentum at the end of the schedule; it changes linearly to this value after the warm-up.", ge=0, lt=1
    )
    momentum_correction: bool = result_field(
        False,
        "Multiply momentum by rate(t) / rate(t - 1) during the warm-up, for momentum buffers that contain the "
        "learning rate (Goyal 2017, section 3; Codreanu 2017).",
    )

    @model_validator(mode="after")
    def _check_milestones(self) -> "ScheduleSection":
        if list(self.milestones) != sorted(set(self.milestones)) or any(m <= 0 for m in self.milestones):
            raise conflict_error("milestones", "must be positive and rising", got=list(self.milestones))
        return self


class PhaseSection(Section):
    """Later part of a run; options left out keep the values of the phase before."""

    start: float = result_field(..., "Epoch at which the phase begins; it may lie inside an epoch.", gt=0)
    schedule: ScheduleSection | None = result_field(
        None,
        "Schedule of this phase (options of train.schedule), counted from the start of the phase; default: the "
        "schedule of the phase before continues.",
    )
    global_batch: int | None = result_field(
        None,
        "Global batch size from here on, images. Schedules count epochs, so the learning rate keeps its course; it is "
        "not scaled.",
        ge=1,
    )
    accumulation: int | None = placement_field(
        None, "Forward-backward passes per step from here on, for a batch that memory does not hold.", ge=1
    )
    momentum: float | None = result_field(None, "Momentum from here on.", ge=0, lt=1)
    weight_decay: float | None = result_field(None, "Weight decay from here on.", ge=0)
    reset_momentum: bool = result_field(
        False, "Begin with an empty momentum buffer, as a run does that starts from saved weights."
    )
    crop: CropSection | None = result_field(None, "Training augmentation from here on (options of input.crop).")
    image_size: int | None = result_field(
        None, "Side of the square training image in pixels from here on (progressive resizing).", ge=4
    )
