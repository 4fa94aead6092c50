"""Checks of the input section against the rest of a run document."""

from podscale.config.batch_phases import batch_phases
from podscale.config.data import InputSection
from podscale.config.fields import conflict_error
from podscale.config.run import RunDocument


def check_input(config: RunDocument) -> None:
    """Raise if the loader or the order of the samples does not support another input option."""
    section = config.input
    _check_cache_form(section)
    if section.loader in ("dali", "nvjpeg"):
        if section.decoded_cache_bytes:
            raise conflict_error(
                "input.decoded_cache_bytes",
                f"input.loader={section.loader} keeps no decoded images",
                got=section.decoded_cache_bytes,
                hint="Set input.loader=native or reference, or input.decoded_cache_bytes=0.",
            )
        if section.augment.is_enabled:
            raise conflict_error(
                "input.loader",
                "it only crops and flips, and input.augment needs more",
                got=section.loader,
                hint="Set input.loader=native or reference, or leave input.augment out.",
            )
    _check_padding(config)
    _check_standardization(section)
    if section.order == "global" and section.groups != 1:
        hint = "Set that, or input.groups=1."
        raise conflict_error("input.groups", "needs input.order=blocked", got=section.groups, hint=hint)
    for phase in batch_phases(config.train):
        if section.order == "blocked" and phase.global_batch % section.groups:
            problem = f"does not divide {phase.batch_option} {phase.global_batch}"
            raise conflict_error("input.groups", problem, got=section.groups)


def _check_cache_form(section: InputSection) -> None:
    """Raise if the form of the decoded cache is set without a cache or a loader that has it."""
    form = section.decoded_cache_form
    if form != "auto" and not section.decoded_cache_bytes:
        raise conflict_error(
            "input.decoded_cache_form",
            "there is no decoded cache, because input.decoded_cache_bytes is 0",
            got=form,
            hint="Set input.decoded_cache_bytes, or leave input.decoded_cache_form out.",
        )
    if form == "coefficients" and section.loader not in ("auto", "native"):
        raise conflict_error(
            "input.decoded_cache_form",
            f"input.loader={section.loader} keeps no coefficients",
            got=form,
            hint="Set input.loader=native, or input.decoded_cache_form=pixels.",
        )


def _check_padding(config: RunDocument) -> None:
    """Raise if a random crop may hold nothing but padding."""
    crops = {"input.crop": config.input.crop}
    crops |= {f"train.phases.{i}.crop": phase.crop for i, phase in enumerate(config.train.phases) if phase.crop}
    side = min(config.training_sizes)
    for key, crop in crops.items():
        if crop.padding is not None and crop.padding >= side:
            raise conflict_error(
                f"{key}.padding",
                f"not less than the side of the images, {side} px: some crops would hold nothing else",
                got=crop.padding,
                hint="Lower it; 4 is usual for images of 32 px.",
            )


def _check_standardization(section: InputSection) -> None:
    """Raise if constants of the data set are set that per-image standardisation does not use."""
    if not section.per_image_standardization:
        return
    names = ["std"] if section.augment.is_enabled else ["mean", "std"]  # augmentation fills with the mean colour
    for name in names:
        value = getattr(section, name)
        if value != InputSection.model_fields[name].default:
            raise conflict_error(
                f"input.{name}",
                "input.per_image_standardization takes mean and deviation from each image",
                got=value,
                hint=f"Leave out input.{name}, or input.per_image_standardization.",
            )
