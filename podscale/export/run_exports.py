"""Exported files of a run's document."""

from collections.abc import Iterator

from podscale.config import RunConfig
from podscale.export.export_model import ExportOptions, export_model
from podscale.export.export_result import Export
from podscale.runs import RunDirectory


def export_run(config: RunConfig, shard_set: str) -> Iterator[str]:
    """Write each file of the export section and register them; yield a report of each. Raises as `export_model`.

    Args:
        shard_set: location of the shards, whose images check and calibrate.
    """
    run, section = RunDirectory.for_config(config), config.export
    run.exports.mkdir(exist_ok=True)
    exports: list[Export] = []
    for name, file in zip(section.formats, section.file_names, strict=True):
        options = ExportOptions(
            format=name.removesuffix("-int8"),
            out=run.exports / file,
            preprocessing=section.preprocessing and name != "safetensors",
            int8=name.endswith("-int8"),
            shard_set=shard_set,
            limit=section.images,
            calibration=section.calibration_images,
        )
        exports.append(export_model(run.path, options))
        yield exports[-1].to_text()
    if section.mlflow_model is not None:
        from podscale.export.mlflow_registry import register_exports

        yield register_exports(config, exports)
    if section.kubeflow.address is not None:
        from podscale.export.kubeflow_registry import register_in_kubeflow

        yield register_in_kubeflow(config, exports)
