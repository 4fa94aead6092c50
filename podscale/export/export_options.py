"""Options of an export, and the formats of exported files."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from podscale.config.export import CALIBRATION_IMAGES, CHECK_IMAGES, FILE_NAMES
from podscale.errors import InputError


@dataclass(frozen=True)
class ExportFormat:
    """Format of an exported file.

    Args:
        label: name for users.
        packages: packages that writing and checking need besides PyTorch.
        takes_preprocessing: preprocessing can be part of the file.
    """

    label: str
    packages: tuple[str, ...] = ()
    takes_preprocessing: bool = True


FORMATS = {
    "onnx": ExportFormat("ONNX", ("onnx", "onnxscript", "onnxruntime")),
    "torch-export": ExportFormat("torch.export"),
    "torchscript": ExportFormat("TorchScript"),
    "html": ExportFormat("page with the model", ("onnx", "onnxscript", "onnxruntime")),
    "safetensors": ExportFormat("safetensors", takes_preprocessing=False),
}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export.

    Args:
        format: key of `FORMATS`.
        out: file to write; None: export/model.SUFFIX in the run or model directory.
        repository: folder in which REPOSITORY/RUN/1/model.onnx is written instead, as Triton and KServe read it.
        preprocessing: uint8 NHWC in and probabilities out; else normalised float32 NCHW in and logits out.
        int8: quantise weights and activations; ONNX alone.
        images: locations of images for the check and the calibration; none: the shard set, else the digits.
        shard_set: location of the run's shard set; None: the one in its workspace, if it is there.
        limit: most images of the check.
        calibration: most images of the calibration.
        calibrate: divide the logits by the temperature that the run's evaluation fitted.
    """

    format: str = "onnx"
    out: Path | None = None
    repository: Path | None = None
    preprocessing: bool = False
    int8: bool = False
    images: Sequence[str] = ()
    shard_set: str | None = None
    limit: int = CHECK_IMAGES
    calibration: int = CALIBRATION_IMAGES
    calibrate: bool = True


def find_format(name: str) -> ExportFormat:
    """Return a format by name. Raises InputError for an unknown one, or if its packages are not installed."""
    if name not in FORMATS:
        raise InputError("unknown format", field="--format", got=name, hint=f"Choose {', '.join(FORMATS)}.")
    found = FORMATS[name]
    for package, extra in (("torch", "torch"), *((each, "export") for each in found.packages)):
        if find_spec(package) is None:
            hint = f"Run `pip install 'podscale[{extra}]'`"
            raise InputError(f"{package} is not installed", field=f"--format {name}", hint=hint)
    return found


def check_options(options: ExportOptions, chosen: ExportFormat) -> None:
    """Raise InputError for an option that is out of range, or that the format does not have."""
    for name in ("limit", "calibration"):
        if getattr(options, name) < 1:
            raise InputError("must be at least 1", field=f"--{name}", got=getattr(options, name))
    if options.int8 and options.format not in ("onnx", "html"):
        raise InputError("only ONNX files and pages", field="--int8", got=options.format, hint="Add --format onnx.")
    if options.preprocessing and not chosen.takes_preprocessing:
        hint = "Leave it out, or choose onnx, torch-export or torchscript."
        raise InputError("the file has weights alone", field="--preprocessing", got=options.format, hint=hint)
    if options.repository is not None and options.format != "onnx":
        raise InputError("takes ONNX files only", field="--repository", got=options.format, hint="Add --format onnx.")
    if options.repository is not None and options.out is not None:
        raise InputError("names the file already", field="--repository", hint="Leave out --out.")
    suffix = Path(FILE_NAMES[options.format]).suffix
    if options.out is not None and options.out.suffix != suffix:
        hint = f"End the name with {suffix}: commands know the format by it."
        raise InputError(f"not the name of a {chosen.label} file", field="--out", got=str(options.out), hint=hint)
