"""Compiled KFP packages of pipelines and components.

`python -m podscale.pipelines.package` writes the committed packages: two presets' pipelines and each component's
component.yaml. Tests compare them, so run it after a change of a component, a preset or the run document.
"""

import tempfile
from pathlib import Path
from typing import Any

from podscale.components.collapse.component import collapse
from podscale.components.configure.component import configure
from podscale.components.evaluate.component import evaluate
from podscale.components.export.component import export
from podscale.components.export_page.component import export as export_with_page
from podscale.components.pack.component import pack
from podscale.components.report.component import report
from podscale.components.shard.component import shard
from podscale.components.summary.component import summary
from podscale.components.train.component import train
from podscale.config import RunConfig, load
from podscale.errors import InputError
from podscale.kubernetes.job_spec import pod_telemetry
from podscale.pipelines import presets
from podscale.pipelines.kfp_fast_import import compiler
from podscale.pipelines.task_placement import task_placer
from podscale.pipelines.training_pipeline import PipelineOptions, training_pipeline

from podscale.components.cells.component import cells  # isort: skip (kfp_fast_import must import kfp first)
from podscale.components.findings.component import findings  # isort: skip


COMPONENT_FUNCTIONS = {
    "configure": configure,
    "pack": pack,
    "shard": shard,
    "train": train,
    "collapse": collapse,
    "evaluate": evaluate,
    "report": report,
    "export": export,
    "export_page": export_with_page,
    "summary": summary,
    "cells": cells,
    "findings": findings,
}
"""Component by its folder in `components/`."""

ENSEMBLE_PRESET = "digits-ensemble"
"""Preset whose pipeline includes the collapse of snapshots."""

KFP_VERSIONS = ("2.15", "2.16")
"""Supported KFP versions; 2.16 stands for newer ones too. 2.15 lacks a task's security context."""


def package_pipeline(config: RunConfig, *, cache: bool = True, kfp: str = KFP_VERSIONS[-1]) -> str:
    """Compile the pipeline of a run document to a KFP package (YAML).

    `cache` lets the backend reuse the shard stage's result. Raises InputError if the document needs something that
    KFP's tasks do not support.
    """
    place = task_placer(config, security=has_security_context(kfp))
    options = PipelineOptions(place_task=place, parts=config.launch.shard_pods, cache=cache)
    # Tasks that run a stage in their own pod serve its metrics there.
    served = config.model_copy(update={"telemetry": pod_telemetry(config)})
    return compile_to_yaml(training_pipeline(served, options))


def has_security_context(kfp: str) -> bool:
    """Return True if tasks of a KFP version have a security context. Raises InputError for an unknown version."""
    if kfp not in KFP_VERSIONS:
        hint = f"Choose one of {', '.join(KFP_VERSIONS)} (the last includes newer ones)."
        raise InputError("unknown version", field="--kfp", got=kfp, hint=hint)
    return kfp != "2.15"


def component_package(name: str) -> str:
    """Compile one component to a KFP package (YAML)."""
    return compile_to_yaml(COMPONENT_FUNCTIONS[name])


def generated_files() -> dict[Path, str]:
    """Return path and expected content of every generated file."""
    here = Path(__file__).parent
    components = here.parent / "components"
    return {
        **{here / f"{name}.pipeline.yaml": _preset_package(name) for name in (presets.DEFAULT_PRESET, ENSEMBLE_PRESET)},
        **{components / name / "component.yaml": component_package(name) for name in COMPONENT_FUNCTIONS},
    }


def _preset_package(name: str) -> str:
    """Compile the pipeline of a preset for a cluster with the chart's workspace."""
    workspace = [f"run.workspace={presets.CHART_WORKSPACE}", f"launch.cluster.workspace_claim={presets.CHART_CLAIM}"]
    return package_pipeline(load(presets.resolve_preset(name), workspace))


def compile_to_yaml(what: Any) -> str:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "package.yaml"
        compiler.Compiler().compile(what, str(path))
        return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    for path, content in generated_files().items():
        path.write_text(content, encoding="utf-8")
        print(path)
