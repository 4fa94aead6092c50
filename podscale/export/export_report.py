"""Report of an export: the file, its inputs and outputs, and its agreement with the model."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from podscale.export.agreement import TOLERANCE, Agreement
from podscale.export.formats import FORMATS
from podscale.prediction.exported_file import ExportMetadata
from podscale.util.files import file_sha256
from podscale.util.formatting import format_bytes, format_count
from podscale.version import VERSION


@dataclass(frozen=True)
class Export:
    """Exported file with the result of its check.

    Args:
        path: final name.
        written: where the file is now.
        format: key of `FORMATS`.
        agreement: comparison of the file with PyTorch.
        fp32: for int8, that of its fp32 form.
        calibration: calibration images of int8, for users.
    """

    path: Path
    written: Path
    format: str
    metadata: ExportMetadata
    agreement: Agreement
    fp32: Agreement | None = None
    calibration: str | None = None

    @property
    def report(self) -> Path:
        """Report of the check, beside the file."""
        return self.path.with_name(f"{self.path.name}.json")

    @property
    def opset(self) -> int | None:
        """Version of ONNX's operators; None in other formats."""
        if self.format != "onnx":
            return None
        imports = import_module("onnx").load(str(self.written), load_external_data=False).opset_import
        return next(int(each.version) for each in imports if not each.domain)

    def to_json(self) -> dict[str, Any]:
        """Return the report of the check."""
        described, packages = self.metadata.to_strings(), ("torch", *FORMATS[self.format].packages)
        return {
            "file": self.path.name,
            "sha256": file_sha256(self.written),
            "bytes": self.written.stat().st_size,
            "format": self.format,
            **{
                name: described[f"podscale:{name}"]
                for name in ("run", "model", "weights_sha256", "input", "output", "quantization")
            },
            "temperature": self.metadata.temperature,
            "opset": self.opset,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "packages": {"podscale": VERSION, **{name: str(import_module(name).__version__) for name in packages}},
            "check": asdict(self.agreement),
            "check_fp32": asdict(self.fp32) if self.fp32 is not None else None,
            "calibration": self.calibration,
        }

    def to_text(self) -> str:
        """Return the report in a few lines for the terminal."""
        description, agreement = self.metadata.description, self.agreement
        size, pixels = description["preprocessing"]["image_size"], self.metadata.preprocessing
        shape = f"uint8 [n, {size}, {size}, 3]" if pixels else f"float32 [n, 3, {size}, {size}], normalised"
        opset = f", opset {self.opset}" if self.opset is not None else ""
        classes = len(description["classes"])
        lines = [
            f"{self.path}: {FORMATS[self.format].label}{opset}, {format_bytes(self.written.stat().st_size)}",
            f"  in: {shape}; out: {'probabilities' if pixels else 'logits'} of {classes} classes",
        ]
        if pixels and self.metadata.temperature is not None:
            lines[-1] += f", calibrated by temperature {self.metadata.temperature:.3f}"
        checked = self.fp32 or agreement
        same = f"the same class for {checked.top1_equal:,} of {format_count(checked.images, 'image')}"
        if checked.near_ties:
            same += f" ({format_count(checked.near_ties, 'near tie')})"
        worst = max(checked.largest_difference, checked.largest_log_difference or 0.0)
        lines.append(f"  check against PyTorch: differs by {worst:.1e} at most (tolerance {TOLERANCE:.0e}), {same}")
        lines.append(f"  images: {agreement.source}")
        if checked.top1 is not None:
            lines.append(f"  top-1 {checked.top1:.2%}")
        if self.fp32 is not None:
            lines += self._int8_lines()
        return "\n".join([*lines, f"  report: {self.report}"])

    def _int8_lines(self) -> list[str]:
        agreement = self.agreement
        equal = f"the same class as fp32 for {agreement.top1_equal:,} of {format_count(agreement.images, 'image')}"
        lines = [f"  int8: {equal}, calibrated on {self.calibration}"]
        if agreement.top1 is not None and agreement.reference_top1 is not None:
            loss = 100 * (agreement.reference_top1 - agreement.top1)
            lines.append(f"  int8: top-1 {agreement.top1:.2%}, a loss of {loss:.2f} points")
        return lines
