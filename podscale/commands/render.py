"""`podscale render`: the objects of a cluster that carry out a run, as YAML."""

import sys
from collections.abc import Sequence
from pathlib import Path

from podscale.commands.documents import resolved
from podscale.config import RunConfig
from podscale.config.preflight import find_problems
from podscale.errors import InputError
from podscale.launch.jobspec import JobSpec, Stage, job_spec
from podscale.launch.render import RENDERERS, Manifest, backend_of, render, suited
from podscale.launch.render.text import to_yaml

STAGES: tuple[Stage, ...] = ("shard", "train", "evaluate", "report")


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
    config = resolved(document, changes, defaults)
    text = to_yaml(objects(config, stages_of(stage), backend))
    for problem in find_problems(config, "cluster"):
        print(f"note: {problem}", file=sys.stderr)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", field=str(output)) from error


def stages_of(name: str) -> tuple[Stage, ...]:
    """The stages that a person means. Raises InputError for an unknown name."""
    if name == "all":
        return STAGES
    found = tuple(stage for stage in STAGES if stage == name)
    if not found:
        raise InputError("unknown stage", field="--stage", got=name, hint=f"Choose one of {', '.join(STAGES)}, all.")
    return found


def objects(config: RunConfig, stages: Sequence[Stage], backend: str | None) -> list[Manifest]:
    """The objects of some stages, in the order in which to create them. backend: default: what the document says."""
    if backend is not None and backend not in RENDERERS:
        hint = f"Choose one of {', '.join(RENDERERS)}."
        raise InputError("no kind of job", field="--backend", got=backend, hint=hint)
    specs = [job_spec(config, stage) for stage in stages]
    return [
        one for spec in specs for one in render(spec, backend_of(spec, backend or likely_backend(config, spec))).all
    ]


def likely_backend(config: RunConfig, spec: JobSpec) -> str:
    """The document's own; where it leaves that open, what suits the job best on a cluster that has everything."""
    return suited(spec)[0] if config.launch.backend in ("local", "auto") else config.launch.backend
