"""Model section of a run document: the name of the network, of our catalogue or from elsewhere, and its options."""

import difflib
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import WithJsonSchema, model_validator

from podscale.config.fields import Section, conflict_error, result_field
from podscale.util.plugins import CALLABLE_PATTERN, NAME_PATTERN

CATALOGUE_NAMES = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet56",
    "resnet110",
    "inception_v3",
    "inception_resnet_v2",
    "alexnet",
)
"""Names of Podscale's own networks (docs/reference/models.md)."""
CIFAR_RESNETS = ("resnet20", "resnet32", "resnet44", "resnet56", "resnet110")
"""Residual networks of He 2015, section 4.2, which always have a small stem."""
LIBRARIES = ("torchvision", "timm", "python", "plugin")
"""Prefixes of models from elsewhere."""
EXTERNAL_PATTERN = rf"^(torchvision:[A-Za-z0-9_]+|timm:[A-Za-z0-9_.\-]+|{CALLABLE_PATTERN}|{NAME_PATTERN})$"
EXTERNAL_FORMS = "torchvision:NAME, timm:NAME, python:MODULE:CALLABLE or plugin:NAME"


class ModelSource(NamedTuple):
    """Origin of a model from elsewhere; `name` is the name in the library, or MODULE:CALLABLE."""

    library: str
    name: str


def model_source(name: str) -> ModelSource | None:
    """Return the library of a model's name and its name there; None for our catalogue."""
    library, colon, rest = name.partition(":")
    return ModelSource(library, rest) if colon else None


def is_model_name(name: str) -> bool:
    """Return True for a name of the catalogue or a well-formed name of a model from elsewhere."""
    return name in CATALOGUE_NAMES or re.fullmatch(EXTERNAL_PATTERN, name) is not None


def suggest_model_name(name: str) -> str:
    """Return the hint for an unknown name: similar names of the catalogue, and the forms of models from elsewhere."""
    library, colon, rest = name.partition(":")
    if colon and library not in LIBRARIES and (similar := difflib.get_close_matches(library, LIBRARIES, 1, 0.5)):
        return f"Did you mean {similar[0]}:{rest}?"
    if colon and library in LIBRARIES:
        return f"Write {EXTERNAL_FORMS}."
    similar = difflib.get_close_matches(name, CATALOGUE_NAMES, 1, 0.75)
    if similar:
        return f"Did you mean {similar[0]}?"
    advice = f"The catalogue has {', '.join(CATALOGUE_NAMES)}. Models from elsewhere are named {EXTERNAL_FORMS}"
    return f"{advice}, for example torchvision:{name}." if name.isidentifier() else f"{advice}."


def model_name_schema() -> dict[str, object]:
    """Return the JSON schema of `model.name`."""
    return {"anyOf": [{"enum": list(CATALOGUE_NAMES)}, {"pattern": EXTERNAL_PATTERN}], "type": "string"}


class BatchNormSection(Section):
    momentum: float = result_field(
        0.1, "Weight of new statistics in the running ones; 0.1 is the published decay of 0.9.", gt=0, le=1
    )
    eps: float = result_field(1e-5, "Added to the variance.", gt=0)
    span: int | None = result_field(
        None,
        "Images that share batch statistics, at any number of ranks (`model_bn_span` in MLPerf's logs): part of a "
        "rank's batch, or the batches of a group of ranks. Default: set by `group`.",
        ge=2,
    )
    group: int = result_field(
        1, "Ranks that share batch statistics (Ying 2018); 1 = statistics of each rank alone.", ge=1
    )
    running: Literal["mean", "first"] = result_field(
        "mean", "Running statistics of the model: `mean` over all ranks, or those of the `first` rank."
    )

    @model_validator(mode="after")
    def _check_span(self) -> "BatchNormSection":
        if self.span is not None and self.group != 1:
            raise conflict_error(
                "span",
                f"sets the images that share statistics, and so does group={self.group}",
                got=self.span,
                hint="Give one.",
            )
        return self


class AlexNetSection(Section):
    """Options of alexnet. Local response normalisation is not implemented: batch norm or nothing replaces it.

    Sources: Krizhevsky 2012 (groups, dropout); You 2017, "AlexNet-BN", and Jia 2018 (batch norm). Of the latter two,
    the positions of batch norm and the choice of two groups are from memory, not checked in the papers.
    """

    groups: Literal[1, 2] = result_field(
        2, "Groups of convolutions 2, 4 and 5: 2 = the two towers of Krizhevsky 2012, 1 = whole convolutions."
    )
    convolution_norm: bool = result_field(
        True, "Batch norm after each convolution, in the place of its bias (You 2017)."
    )
    pool5_norm: bool = result_field(True, "Batch norm after pool5, before the first linear layer (Jia 2018).")
    dropout: float = result_field(0.5, "Dropout rate of the outputs of fc6 and fc7.", ge=0, lt=1)


class InceptionSection(Section):
    """Options of inception_v3 and inception_resnet_v2, both published with model.batch_norm.eps 1e-3.

    Sources: the weight of the auxiliary head's loss is that of torchvision's reference training; Szegedy 2016 keeps 0.8
    of the outputs before the classifier of Inception-ResNet-V2 (torchvision leaves out 0.5 in Inception-V3).
    """

    auxiliary: float = result_field(
        0.4, "Inception-V3: weight of the auxiliary head's loss in training; 0 = no auxiliary head.", ge=0
    )
    dropout: float = result_field(0.2, "Dropout rate of the classifier's inputs.", ge=0, lt=1)


class ModelSection(Section):
    name: Annotated[str, WithJsonSchema(model_name_schema())] = result_field(
        "resnet50",
        "Architecture: a name of the catalogue (docs/reference/models.md), `torchvision:NAME`, `timm:NAME` (extra "
        "`timm`), or `python:MODULE:CALLABLE`, a function or class that takes `num_classes` and returns a "
        "torch.nn.Module.",
    )
    options: dict[str, Any] = result_field(
        {},
        "Arguments of a model from torchvision, timm or Python, by name, such as `img_size` or `drop_path_rate`. "
        "Podscale sets the number of classes.",
    )
    block: Literal["v1", "v2"] = result_field(
        "v1",
        "Residual networks: order of the layers in a block. `v1`: batch norm and ReLU after each convolution, ReLU "
        "after the sum (He 2015). `v2`: pre-activation (He 2016), batch norm and ReLU before each convolution, none "
        "after the sum, and once more before the classifier, as in TensorFlow's official models.",
    )
    stem: Literal["imagenet", "small"] = result_field(
        "imagenet",
        "First layers. `imagenet`: 7x7 convolution of stride 2 and max-pool. `small`: one 3x3 convolution of stride "
        "1, for images below about 100 px; the CIFAR family (resnet20 to resnet110) always has it.",
    )
    width: int = result_field(
        64,
        "Channels of a residual network's first stage. 64 is the published width of every network; in networks that "
        "begin with another number, all channels scale in proportion.",
        ge=4,
        multiple_of=4,
    )
    shortcut: Literal["projection", "padding"] | None = result_field(
        None,
        "Residual networks: shortcut between shapes that differ, a `projection` (He 2015, option B), or every other "
        "pixel with channels of zeros appended (`padding`, option A). Default: padding in the CIFAR family, else "
        "projection. In block v2 the default is always projection, and the first block of each stage has one.",
    )
    blurpool: bool = result_field(
        False,
        "Residual networks: blur with [1, 2, 1] in both directions before each strided convolution except the first "
        "(Zhang 2019, as in FFCV).",
    )
    stochastic_depth: float = result_field(
        0.0,
        "Residual networks: probability that training drops the last block's branch for an image; it rises linearly "
        "from 0 at the first block (Huang 2016, as in timm).",
        ge=0,
        lt=1,
    )
    zero_init_last_gamma: bool = result_field(
        True,
        "Initialise the last batch-norm scale of each residual block to 0: the block starts as the identity (Goyal "
        "2017, section 5.1). A block v2 ends in a convolution, whose weights are initialised to 0 instead; He 2016 and "
        "TensorFlow's official models do not.",
    )
    batch_norm: BatchNormSection = BatchNormSection()
    alexnet: AlexNetSection = AlexNetSection()
    inception: InceptionSection = InceptionSection()

    @model_validator(mode="after")
    def _check_name(self) -> "ModelSection":
        if not is_model_name(self.name):
            raise conflict_error("name", "unknown model", got=self.name, hint=suggest_model_name(self.name))
        if self.options and not self.is_external:
            raise conflict_error(
                "options",
                f"{self.name} is a network of the catalogue, which has options of its own in the section model",
                got=self.options,
                hint="Leave it out.",
            )
        return self

    @property
    def is_external(self) -> bool:
        """Return True for a model from torchvision, timm or a user's module."""
        return model_source(self.name) is not None

    @property
    def small_stem(self) -> bool:
        """Return True if the network begins with one 3x3 convolution of stride 1."""
        return self.stem == "small" or self.name in CIFAR_RESNETS

    @property
    def is_residual(self) -> bool:
        """Return True for the residual networks, of ImageNet or CIFAR."""
        return self.name.startswith("resnet")

    @property
    def has_auxiliary_head(self) -> bool:
        """Return True if training adds the loss of a second classifier."""
        return self.name == "inception_v3" and self.inception.auxiliary > 0
