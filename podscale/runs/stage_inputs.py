"""Inputs of a stage: the options, the shard set and the files that its output depends on.

A finished stage records them. Options that came later in a newer version count with their defaults, which are what the
older version did, so that its finished stages stay finished.
"""

import hashlib
from pathlib import Path
from typing import Any

from podscale.config import RunConfig
from podscale.config.fields import FieldClass
from podscale.config.identity import add_later_options, field_values
from podscale.data.manifest import MANIFEST_FILE
from podscale.runs.directory import RunDirectory
from podscale.runs.ensemble_members import MODEL_JSON, combined_model_directories, evaluated_model_directories
from podscale.util.locations import Location

COMBINATION_OPTIONS = ("evaluate.combine", "evaluate.baseline")
"""Options of class display that an evaluation of several models depends on."""


def stage_inputs(config: RunConfig, stage: str, shard_set: str) -> dict[str, Any]:
    """Return everything that the output of a stage depends on, as JSON: options by class, shard set and files."""
    run = RunDirectory.for_config(config)
    classes = tuple(FieldClass) if stage == "report" else (FieldClass.RESULT,)
    options: dict[str, Any] = {str(kind): field_values(config, kind) for kind in classes}
    if stage == "evaluate" and combined_model_directories(config):
        shown = field_values(config, FieldClass.DISPLAY)
        options[FieldClass.DISPLAY] = {name: shown[name] for name in COMBINATION_OPTIONS}
    if stage == "export":
        shown = field_values(config, FieldClass.DISPLAY)
        options[FieldClass.DISPLAY] = {name: shown[name] for name in shown if name.startswith("export.")}
    files = {
        "evaluate": [file for directory in evaluated_model_directories(config) for file in _model_files(directory)],
        "report": [run.evaluation, run.predictions, *_model_files(run.model)],
        "export": [run.evaluation, *_model_files(run.model)],
    }.get(stage, [])
    return {
        "options": options,
        "shards": _manifest_hash(shard_set),
        "files": [_file_stamp(file) for file in files],
    }


def is_same_inputs(recorded: Any, inputs: dict[str, Any]) -> bool:
    """Return True if recorded inputs, perhaps of an older version, are the present ones.

    Args:
        recorded: entry of a file, so anything.
        inputs: see `stage_inputs`.
    """
    if not isinstance(recorded, dict) or not isinstance(recorded.get("options"), dict):
        return False
    filled = {}
    for kind, names in inputs["options"].items():
        values = recorded["options"].get(kind)
        if not isinstance(values, dict):
            return False
        filled[kind] = add_later_options(values, names, FieldClass(kind))
    return {**recorded, "options": {**recorded["options"], **filled}} == inputs


def _model_files(directory: Path) -> list[Path]:
    """Return the files that a model's predictions depend on."""
    return [directory / MODEL_JSON, *sorted(directory.glob("*.safetensors"))]


def _manifest_hash(shard_set: str) -> str:
    directory = Location.parse(shard_set).local_path
    if directory is None:
        return shard_set  # remote sets are named by the fingerprint of their data
    try:
        return hashlib.sha256((directory / MANIFEST_FILE).read_bytes()).hexdigest()
    except OSError:
        return ""


def _file_stamp(path: Path) -> list[str | int]:
    try:
        stat = path.stat()
    except OSError:
        return [path.name]
    return [path.name, stat.st_size, stat.st_mtime_ns]
