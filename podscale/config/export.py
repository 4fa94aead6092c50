"""Export section of a run document: files of the trained model that the pipeline writes after the report."""

from typing import Literal

from pydantic import model_validator

from podscale.config.fields import Section, conflict_error, display_field
from podscale.util import env

FormatName = Literal["onnx", "onnx-int8", "torch-export", "torchscript", "safetensors", "html", "html-int8"]
FILE_NAMES: dict[str, str] = {
    "onnx": "model.onnx",
    "onnx-int8": "model.int8.onnx",
    "torch-export": "model.pt2",
    "torchscript": "model.torchscript",
    "safetensors": "model.safetensors",
    "html": "demo.html",
    "html-int8": "demo.int8.html",
}
"""Name of each format's file in the folder `export` of a run."""
PAGE_FORMATS = ("html", "html-int8")
"""Formats that are pages; viewers that show one page take the first."""
EXPORT_METADATA_FILE = "podscale_export.json"
"""Member of an exported torch archive that has its metadata."""
CHECK_IMAGES = 1000
"""Default of the most images of a check."""
CALIBRATION_IMAGES = 64
"""Default of the most images that calibrate int8."""


class KubeflowRegistrySection(Section):
    """Kubeflow Model Registry in which the files are registered; it keeps their addresses and properties."""

    address: str | None = display_field(
        None,
        "Address of the registry's REST API, such as http://model-registry-service.kubeflow:8080; a bearer token comes "
        f"from {env.MODEL_REGISTRY_TOKEN} or the file KF_PIPELINES_SA_TOKEN_PATH.",
        pattern=r"^https?://[^/\s?#]+[^\s?#]*$",
    )
    model: str | None = display_field(
        None,
        "Registered model that gets the files as a version; made if it does not exist. Printable ASCII without `/`.",
        max_length=128,
        pattern=r"^[!-.0-~]([ -.0-~]*[!-.0-~])?$",
    )
    workspace_uri: str | None = display_field(
        None,
        "URL at which readers of the registry find run.workspace, such as s3://bucket/workspace; default: pvc:// for a "
        "claim of the pods, gs:// for a mounted bucket, else file://.",
        pattern=r"^[a-z][a-z0-9+.-]*://[^\s]+$",
    )
    storage_key: str | None = display_field(
        None,
        "Key of KServe's storage secret for that URL; the files' paths below the bucket are recorded with it.",
        min_length=1,
    )

    @model_validator(mode="after")
    def _check_both(self) -> "KubeflowRegistrySection":
        if (self.address is None) != (self.model is None):
            key = "model" if self.model is None else "address"
            raise conflict_error(key, "address and model belong together", hint="Give both, or neither.")
        if self.storage_key is not None and self.workspace_uri is None:
            hint = "Give the URL that the secret opens, such as s3://bucket/workspace."
            raise conflict_error("workspace_uri", "storage_key needs it", hint=hint)
        return self


class ExportSection(Section):
    """Files of the trained model, each compared with it before it takes its name."""

    formats: tuple[FormatName, ...] = display_field(
        (),
        "Files to write after the report: `onnx`, `onnx-int8` (quantised on training images), `torch-export`, "
        "`torchscript`, `safetensors`, `html` (a page that classifies pictures in the browser), `html-int8`. Default: "
        "none, and the pipeline has no export stage.",
    )
    preprocessing: bool = display_field(
        False,
        "Take uint8 pixels [n, size, size, 3] and give probabilities; else normalised float32 and logits. Safetensors "
        "have weights alone.",
    )
    images: int = display_field(CHECK_IMAGES, "Most validation images of the check and of int8's accuracy.", ge=1)
    calibration_images: int = display_field(CALIBRATION_IMAGES, "Most training images that calibrate int8.", ge=1)

    mlflow_model: str | None = display_field(
        None,
        "Register the files as a new version of this registered model of MLflow, at telemetry.mlflow.tracking_uri or "
        "MLFLOW_TRACKING_URI.",
        min_length=1,
        max_length=256,
        pattern=r"^[^/:'\s][^/:']*$",
    )
    kubeflow: KubeflowRegistrySection = KubeflowRegistrySection()

    @model_validator(mode="after")
    def _check_formats(self) -> "ExportSection":
        if len(set(self.formats)) < len(self.formats):
            raise conflict_error("formats", "names a format twice", got=list(self.formats))
        for key, name in (("mlflow_model", self.mlflow_model), ("kubeflow.model", self.kubeflow.model)):
            if name is not None and not self.formats:
                hint = "Set export.formats, for example [onnx]."
                raise conflict_error(key, "there is no file to register", got=name, hint=hint)
        return self

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names of the files in the folder `export` of the run."""
        return tuple(FILE_NAMES[name] for name in self.formats)

    @property
    def page(self) -> str | None:
        """Name of the page that viewers show, in fp32 if there are two; None without a page."""
        return next((FILE_NAMES[name] for name in PAGE_FORMATS if name in self.formats), None)
