"""Registration of exported files in the Kubeflow Model Registry, by its REST API.

The registry keeps addresses and properties, not files. So each version gets links to its files, which later exports of
the run do not replace.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from podscale.config import RunConfig
from podscale.errors import PodscaleError
from podscale.export.export_result import Export, exports_identity, version_properties
from podscale.export.model_registry_client import JsonObject, ModelRegistryClient, RegistryConflict, RegistryError
from podscale.runs import RunDirectory
from podscale.runs.directory import local_path
from podscale.util.files import file_sha256
from podscale.util.formatting import format_count
from podscale.version import VERSION

FIELD = "export.kubeflow.address"
VERSIONS_FOLDER = "versions"
"""Folder in the exports of a run with a folder of each registered version."""
MODEL_FORMATS = {"onnx": ("onnx", "1"), "torchscript": ("pytorch", "1")}
"""Names and versions of the formats in KServe's runtimes; other formats have their own name and no version."""


@dataclass
class _Registration:
    """Progress of a registration, for the line or the error that the user gets."""

    name: str
    files: int
    version: str = ""
    registered: int | None = None
    made: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Sentence about what the registry has."""
        if not self.version:
            return "Nothing was registered"
        if self.registered is None:
            return f"Version {self.version} of {self.name} is there; which files it has is not known"
        return f"Version {self.version} of {self.name} has {self.registered} of {format_count(self.files, 'file')}"


class RegistrationError(PodscaleError):
    """Registration that the registry refused or did not answer; its cause is the RegistryError.

    Args:
        version: name of the version that the registry has; "" if it has none.
        registered: number of its registered files; None if unknown.
    """

    def __init__(self, error: RegistryError, progress: _Registration) -> None:
        rest = "The files are written. Run the same command again to register them."
        hint = ". ".join(filter(None, (error.hint.removesuffix("."), progress.state, rest)))
        super().__init__(f"Kubeflow Model Registry {error.problem}", field=error.field, got=error.got, hint=hint)
        self.version, self.registered = progress.version, progress.registered


def register_in_kubeflow(config: RunConfig, exports: Sequence[Export]) -> str:
    """Register the files as a version of the document's registered model, and return a line for the user.

    The same export has the same version, whose missing files are added. Raises RegistrationError if the registry
    refuses or does not answer.
    """
    section = config.export.kubeflow
    assert section.address is not None
    assert section.model is not None
    progress = _Registration(section.model, len(exports))
    client = ModelRegistryClient(section.address, FIELD)
    try:
        _register(client, config, exports, progress)
    except RegistryError as error:
        raise RegistrationError(error, progress) from error
    what = f"version {progress.version} of {section.model}"
    if not progress.made:
        return f"Kubeflow Model Registry: {what} has these files"
    return f"Kubeflow Model Registry: {what} at {section.address}: {', '.join(progress.made)}"


def _register(
    client: ModelRegistryClient, config: RunConfig, exports: Sequence[Export], progress: _Registration
) -> None:
    identity = exports_identity(exports)[:12]
    folder = RunDirectory.for_config(config).exports / VERSIONS_FOLDER / identity
    version_name = f"{config.run.id}-{identity}"
    wanted = {export.path.name: _artifact(config, export, folder, version_name) for export in exports}
    model = _find_or_create(
        lambda: client.find("/registered_model", name=progress.name),
        lambda: client.create("/registered_models", {"name": progress.name, "state": "LIVE"}),
    )
    version = _find_or_create(
        lambda: client.find("/model_version", name=version_name, parentResourceId=str(model["id"])),
        lambda: client.create(
            f"/registered_models/{model['id']}/versions",
            {
                "name": version_name,
                "registeredModelId": str(model["id"]),
                "description": f"Run {config.run.id}, exported by Podscale {VERSION}",
                "state": "LIVE",
                "customProperties": _metadata(version_properties(config, exports)),
            },
        ),
    )
    progress.version = version_name
    artifacts = f"/model_versions/{version['id']}/artifacts"
    registered = {entry.get("name"): entry for entry in client.list(artifacts)}
    progress.registered = sum(entry["name"] in registered for entry in wanted.values())
    # KServe reads the newest artifact of a version, so the document's first format comes last, and pages come first.
    files = [*wanted][::-1]
    for name in sorted(files, key=lambda name: wanted[name]["artifactType"] == "model-artifact"):
        artifact = wanted[name]
        known = registered.get(artifact["name"])
        if known is None:
            client.create(artifacts, artifact)
            progress.registered = (progress.registered or 0) + 1
            progress.made.append(name)
        elif _is_changed(known, artifact):
            client.update(f"/artifacts/{known['id']}", {key: artifact[key] for key in artifact if key != "name"})
            progress.made.append(f"{name} (changed)")


def _find_or_create(find: Callable[[], JsonObject | None], create: Callable[[], JsonObject]) -> JsonObject:
    """Return the entry; of two runs that create it at once, one finds that of the other."""
    found = find()
    if found is not None:
        return found
    try:
        return create()
    except RegistryConflict:
        found = find()
        if found is None:
            raise
        return found


def _is_changed(known: JsonObject, artifact: JsonObject) -> bool:
    """Return True if a registered artifact lacks a value; those that the registry or a user added count as equal."""
    properties = known.get("customProperties") or {}
    wanted = artifact["customProperties"]
    return any(known.get(key) != value for key, value in artifact.items() if key != "customProperties") or any(
        properties.get(name) != value for name, value in wanted.items()
    )


def _artifact(config: RunConfig, export: Export, folder: Path, version: str) -> JsonObject:
    """Return the artifact of a file: address, format, hash and shape of its inputs and outputs. Pages are documents."""
    kept = _keep_file(export.path, folder)
    described = export.metadata.to_strings()
    properties: dict[str, str | float | int] = {
        "format": export.format,
        "sha256": file_sha256(kept),
        **{name: described[f"podscale:{name}"] for name in ("input", "output", "quantization", "weights_sha256")},
        **({"opset": opset} if (opset := export.opset) is not None else {}),
        **({"top1": export.agreement.top1} if export.agreement.top1 is not None else {}),
    }
    uri = workspace_uri(config) + quote(f"/{kept.relative_to(local_path(config.run.workspace))}")
    artifact: JsonObject = {
        "artifactType": "doc-artifact" if export.format == "html" else "model-artifact",
        "name": f"{version}/{export.path.name}",  # names of artifacts are unique in the whole registry
        "uri": uri,
        "state": "LIVE",
        "customProperties": _metadata(properties),
    }
    if export.format == "html":
        return artifact
    format_name, format_version = MODEL_FORMATS.get(export.format, (export.format, None))
    storage_key = config.export.kubeflow.storage_key
    return artifact | {
        "modelFormatName": format_name,
        **({"modelFormatVersion": format_version} if format_version is not None else {}),
        **({"storageKey": storage_key, "storagePath": urlsplit(uri).path.lstrip("/")} if storage_key else {}),
        "modelSourceKind": "podscale",
        "modelSourceClass": "run",
        "modelSourceId": config.run.id,
        "modelSourceName": export.path.name,
    }


def workspace_uri(config: RunConfig) -> str:
    """Return the URL at which readers of the registry find the workspace, without a slash at its end."""
    cluster, workspace = config.launch.cluster, str(local_path(config.run.workspace))
    if config.export.kubeflow.workspace_uri is not None:
        return config.export.kubeflow.workspace_uri.rstrip("/")
    mounted = [v for v in cluster.volumes if f"{workspace}/".startswith(f"{v.path.rstrip('/')}/")]
    volume = max(mounted, key=lambda v: len(v.path), default=None)
    if volume is not None and (volume.bucket or volume.claim):
        base = f"gs://{volume.bucket}" if volume.bucket else f"pvc://{volume.claim}"
        return base + quote(workspace[len(volume.path.rstrip("/")) :])
    if volume is None and cluster.workspace_claim is not None:
        return f"pvc://{cluster.workspace_claim}"
    return f"file://{quote(str(Path(workspace).absolute()))}".rstrip("/")


def _keep_file(path: Path, folder: Path) -> Path:
    """Return the version's own link to a file, or its copy; one of an earlier export stays."""
    kept = folder / path.name
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = kept.with_name(f".{kept.name}.part")
        part.unlink(missing_ok=True)
        try:
            os.link(path, part)
        except OSError:  # a file system without links, such as a mounted bucket
            shutil.copyfile(path, part)
        part.replace(kept)
    return kept


def _metadata(properties: Mapping[str, str | float | int]) -> JsonObject:
    """Return custom properties of the API: a typed value by name; integers are strings there."""
    values: JsonObject = {}
    for name, value in properties.items():
        if isinstance(value, int):
            values[name] = {"metadataType": "MetadataIntValue", "int_value": str(value)}
        elif isinstance(value, float):
            values[name] = {"metadataType": "MetadataDoubleValue", "double_value": value}
        else:
            values[name] = {"metadataType": "MetadataStringValue", "string_value": value}
    return values
