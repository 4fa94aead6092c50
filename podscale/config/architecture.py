"""What a document may ask of each network: its options, and the smallest images that it can see."""

from podscale.config.conflict import conflict_error
from podscale.config.run import RunDocument

MIN_IMAGE_SIZE = {"alexnet": 63, "inception_v3": 75, "inception_resnet_v2": 75}
"""Sides in pixels below which a network's last pooling would see less than one of its windows."""
MIN_IMAGE_SIZE_IMAGENET_STEM = 32
"""Five halvings: below this the last stage of a residual network would see less than one pixel."""
MIN_IMAGE_SIZE_AUXILIARY = 299
"""Below this the auxiliary head's 5x5 convolution would see less than one of its windows."""


def check_model(config: RunDocument) -> None:
    """Raises where the document asks of its network what this does not have, or gives it too small images."""
    model = config.model
    trained = min(config.training_sizes)
    smallest = min(trained, config.eval_image_size)
    if not model.is_residual:
        _check_residual_options(config)
        least = MIN_IMAGE_SIZE[model.name]
        if smallest < least:
            raise conflict_error(
                "input.image_size",
                f"too small for {model.name}, which needs {least} px",
                got=smallest,
                hint="Raise input.image_size and evaluate.image_size, or take a resnet.",
            )
    elif not model.small_stem and smallest < MIN_IMAGE_SIZE_IMAGENET_STEM:
        raise conflict_error(
            "model.stem",
            f"images of {smallest} px are too small for the imagenet stem, which needs {MIN_IMAGE_SIZE_IMAGENET_STEM}",
            got=model.stem,
            hint="Set model.stem=small.",
        )
    if model.has_auxiliary_head and trained < MIN_IMAGE_SIZE_AUXILIARY:
        raise conflict_error(
            "input.image_size",
            f"too small for the auxiliary head of inception_v3, which needs {MIN_IMAGE_SIZE_AUXILIARY} px in training",
            got=trained,
            hint="Raise input.image_size, or set model.inception.auxiliary=0.",
        )


def _check_residual_options(config: RunDocument) -> None:
    model = config.model
    if model.stem != "imagenet":
        raise conflict_error(
            "model.stem",
            f"{model.name} has no such stem",
            got=model.stem,
            hint="Set model.stem=imagenet, or take a resnet.",
        )
    asked = {"shortcut": model.shortcut is not None, "blurpool": model.blurpool}
    asked["stochastic_depth"] = model.stochastic_depth > 0
    for key in [key for key, wanted in asked.items() if wanted]:
        raise conflict_error(
            f"model.{key}", f"{model.name} has none, only residual networks have", hint="Leave it out."
        )
