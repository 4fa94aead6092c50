"""Formats of exported files."""

from dataclasses import dataclass
from importlib.util import find_spec

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
