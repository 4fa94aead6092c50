"""Compiled packages: what a KFP backend is given, as text.

`python -m podscale.pipelines.package` writes the packages that are committed: the default preset's pipeline and each
component's component.yaml. Tests compare them, so run it after changing a component, a preset or the run document.
"""

import tempfile
from pathlib import Path
from typing import Any

from podscale.config import RunConfig, load
from podscale.pipelines import presets
from podscale.pipelines.kfp_quickly import compiler
from podscale.pipelines.training import evaluate, report, shard, summary, train, training_pipeline

COMPONENTS = {"shard": shard, "train": train, "evaluate": evaluate, "report": report, "summary": summary}


def package(config: RunConfig) -> str:
    """The pipeline of a run document as a KFP package (YAML)."""
    return _compiled(training_pipeline(config))


def component_package(name: str) -> str:
    """One component as a KFP package (YAML)."""
    return _compiled(COMPONENTS[name])


def committed() -> dict[Path, str]:
    """Every generated file that is committed beside its source, with the content it should have."""
    here = Path(__file__).parent
    components = here.parent / "components"
    default = load(presets.resolve(None))
    return {
        here / f"{presets.DEFAULT}.pipeline.yaml": package(default),
        **{components / name / "component.yaml": component_package(name) for name in COMPONENTS},
    }


def _compiled(what: Any) -> str:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "package.yaml"
        compiler.Compiler().compile(what, str(path))
        return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    for path, content in committed().items():
        path.write_text(content, encoding="utf-8")
        print(path)
