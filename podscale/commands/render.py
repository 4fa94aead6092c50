"""`podscale render`: the objects of a cluster that carry out a run, as YAML."""

import sys
from collections.abc import Sequence
from pathlib import Path

from podscale.commands.documents import load_with_defaults
from podscale.config import RunConfig
from podscale.config.preflight import find_problems
from podscale.errors import InputError
from podscale.kubernetes.job_spec import JobSpec, StageName, build_job_spec
from podscale.kubernetes.render import RENDERERS_BY_KIND, Manifest, choose_backend, render_job, suitable_backends
from podscale.kubernetes.render.common import to_yaml

STAGES: tuple[StageName, ...] = ("shard", "train", "evaluate", "report")


def render_run(
    document: str | None,
    changes: Sequence[str],
    *,
    backend: str | None,
    stage: str,
    defaults: str | None,
    output: Path | None,
) -> None:
    """Prints, or writes to `output`, what carries out a stage (`all`: every one); what will not work is told."""
    config = load_with_defaults(document, changes, defaults)
    text = to_yaml(render_stages(config, parse_stages(stage), backend))
    for problem in find_problems(config, "cluster"):
        print(f"note: {problem}", file=sys.stderr)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", field=str(output)) from error


def parse_stages(name: str) -> tuple[StageName, ...]:
    """The stages that a person means. Raises InputError for an unknown name."""
    if name == "all":
        return STAGES
    found = tuple(stage for stage in STAGES if stage == name)
    if not found:
        raise InputError("unknown stage", field="--stage", got=name, hint=f"Choose one of {', '.join(STAGES)}, all.")
    return found


def render_stages(config: RunConfig, stages: Sequence[StageName], backend: str | None) -> list[Manifest]:
    """The objects of some stages, in the order in which to create them. backend: default: what the document says."""
    if backend is not None and backend not in RENDERERS_BY_KIND:
        hint = f"Choose one of {', '.join(RENDERERS_BY_KIND)}."
        raise InputError("no kind of job", field="--backend", got=backend, hint=hint)
    specs = [build_job_spec(config, stage) for stage in stages]
    return [
        one
        for spec in specs
        for one in render_job(spec, choose_backend(spec, backend or likely_backend(config, spec))).all_objects
    ]


def likely_backend(config: RunConfig, spec: JobSpec) -> str:
    """The document's own; where it leaves that open, what suits the job best on a cluster that has everything."""
    return suitable_backends(spec)[0] if config.launch.backend in ("local", "auto") else config.launch.backend
