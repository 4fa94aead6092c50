"""Write the table of docs/reference/models.md from the catalogue: `python tools/models_reference.py`."""

from pathlib import Path

from podscale import models
from podscale.config import ModelSection
from podscale.models import inception, resnet

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- table: tools/models_reference.py -->\n", "<!-- end of table -->\n"
IMAGENET, CIFAR = (224, 1000), (32, 10)
INCEPTION = (299, 1000)
SOURCES = {
    "resnet18": "He 2015, table 1",
    "resnet34": "He 2015, table 1",
    "resnet50": "He 2015, table 1; strides in the 3x3 (Goyal 2017)",
    "resnet101": "as resnet50",
    "resnet152": "as resnet50",
    "resnet20": "He 2015, section 4.2, option A",
    "resnet32": "as resnet20",
    "resnet44": "as resnet20",
    "resnet56": "as resnet20",
    "resnet110": "as resnet20",
    "inception_v3": "Szegedy 2015; with its auxiliary head (23,834,568 without)",
    "inception_resnet_v2": "Szegedy 2016",
    "alexnet": "Krizhevsky 2012, two groups; batch norm after each convolution and pool5",
}


def setting(name: str) -> tuple[int, int]:
    """Return the side of the images in pixels, and the classes, for which a model was published."""
    return CIFAR if name in resnet.CIFAR_BLOCKS else INCEPTION if name in inception.INCEPTION_NAMES else IMAGENET


def row(name: str) -> str:
    side, classes = setting(name)
    spec = models.model_spec(ModelSection.model_validate({"name": name}), classes)
    forward, training = spec.flops(side) / 1e9, spec.training_flops(side) / 1e9
    return f"| {name} | {spec.num_parameters:,} | {side} | {forward:.3g} | {training:.3g} | {SOURCES[name]} |\n"


def table() -> str:
    """Return the table of all models in the catalogue."""
    columns = "| model.name | parameters | image, px | forward, GFLOP | training, GFLOP | source |"
    head = columns + "\n|---|---|---|---|---|---|\n"
    return head + "".join(map(row, SOURCES))


def page(text: str) -> str:
    """Return the page with a new table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
