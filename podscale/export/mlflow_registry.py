"""Registration of exported files in MLflow's model registry, by the package mlflow-skinny (or mlflow)."""

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from podscale.config import RunConfig
from podscale.errors import InputError, PodscaleError
from podscale.export.export_result import Export, exports_identity, version_properties
from podscale.runs import RunDirectory
from podscale.telemetry.trackers.base import SentPoints
from podscale.telemetry.trackers.mlflow import find_experiment
from podscale.util.files import file_sha256
from podscale.util.formatting import one_line

FIELD = "export.mlflow_model"
ARTIFACT_PATH = "podscale-export"
"""Folder of the exports in the artifacts of the MLflow run; each version has a folder of its own in it."""
FILES_TAG = "file_sha256"
"""Tag of a version with the hashes of its files, as JSON."""
IDENTITY_TAG = "metadata_sha256"
"""Tag of a version with the hash of its files' names and metadata."""


def register_exports(config: RunConfig, exports: Sequence[Export]) -> str:
    """Log the files to the run's MLflow run, and register them as a version of the document's registered model.

    Nothing is registered if the newest version has the same model and options. Returns a line for the user. Raises
    PodscaleError if the server refuses or does not answer.
    """
    name = config.export.mlflow_model
    assert name is not None
    try:
        client = import_module("mlflow").MlflowClient(tracking_uri=config.telemetry.mlflow.tracking_uri)
    except ImportError as error:
        hint = "Run `pip install 'podscale[mlflow]'`"
        raise InputError("mlflow is not installed", field=FIELD, got=name, hint=hint) from error
    try:
        return _register(client, config, name, exports)
    except Exception as error:  # MLflow raises the errors of its HTTP and database libraries
        hint = "The files are written. Run the same command again to register them."
        raise PodscaleError(f"MLflow: {one_line(str(error))}", field=FIELD, got=name, hint=hint) from error


def _register(client: Any, config: RunConfig, name: str, exports: Sequence[Export]) -> str:
    tags = _tags(config, exports)
    known = any(model.name == name for model in client.search_registered_models(f"name = '{name}'"))
    versions = client.search_model_versions(f"name = '{name}'") if known else []
    newest = max(versions, key=lambda version: int(version.version), default=None)
    if newest is not None and newest.tags.get(IDENTITY_TAG) == tags[IDENTITY_TAG]:
        return f"MLflow: version {newest.version} of {name} has these files"
    if not known:
        client.create_registered_model(name)
    run_id = _mlflow_run(client, config)
    folder = f"{ARTIFACT_PATH}/{tags[IDENTITY_TAG][:12]}"  # later versions must not replace its files
    for export in exports:
        for path in (export.path, export.report):
            client.log_artifact(run_id, str(path), folder)
    source = f"{client.get_run(run_id).info.artifact_uri}/{folder}"
    version = client.create_model_version(name, source, run_id, tags=tags, description=config.run.id)
    return f"MLflow: version {version.version} of {name} at {client.tracking_uri}"


def _mlflow_run(client: Any, config: RunConfig) -> str:
    """Return the run of the MLflow tracker, else a new one, which later exports take too."""
    sent = SentPoints.for_run(RunDirectory.for_config(config), "mlflow")
    if not sent.id:
        experiment_id = find_experiment(client, config.telemetry.mlflow)
        sent.save_id(str(client.create_run(experiment_id, run_name=config.run.id).info.run_id))
        client.set_terminated(sent.id)
    return sent.id


def _tags(config: RunConfig, exports: Sequence[Export]) -> dict[str, str]:
    """Return tags of the version: its properties, and the hashes of its files."""
    properties = version_properties(config, exports)
    return {
        **{key: f"{value:.6f}" if isinstance(value, float) else str(value) for key, value in properties.items()},
        FILES_TAG: json.dumps({export.path.name: file_sha256(export.path) for export in exports}),
        IDENTITY_TAG: exports_identity(exports),
    }
