"""`podscale study`: a grid of small runs, on this machine or as a package for a KFP backend."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli.options import Kfp, Set, complete_document
from podscale.errors import InputError
from podscale.pipelines import presets

if TYPE_CHECKING:
    from podscale.study import StudyDocument

app = typer.Typer()


def complete_study(incomplete: str) -> list[str]:
    """Return the completions of STUDY: included studies, documents and folders."""
    names = [name for name in presets.study_names() if name.startswith(incomplete)]
    return names + complete_document(incomplete)


@app.command()
def study(
    document: Annotated[
        str,
        typer.Argument(
            metavar="STUDY",
            help="Study document: a path or the name of an included study.",
            autocompletion=complete_study,
        ),
    ],
    changes: Set = [],
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the trials, their estimated time and what is left out; start nothing."),
    ] = False,
    jobs: Annotated[int, typer.Option(help="Trials in parallel; 0 = as many as the cores allow.", min=0)] = 0,
    time_box: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="Start no trial that would end later than this.", min=0.01)
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard existing results and run all trials again.")
    ] = False,
    keep_runs: Annotated[bool, typer.Option("--keep-runs", help="Keep the run directories of the trials.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the results here too, as files to commit.")
    ] = None,
    results_only: Annotated[
        bool, typer.Option("--results-only", help="Write the results of the trials so far; run nothing.")
    ] = False,
    backend: Annotated[
        str, typer.Option(metavar="here|kfp", help="kfp: compile a package that runs the trials in small jobs.")
    ] = "here",
    output: Annotated[Path, typer.Option("--output", "-o", help="With --backend kfp: file to write.")] = Path(
        "study.yaml"
    ),
    parallel: Annotated[int, typer.Option(help="With --backend kfp: pods in parallel.", min=1)] = 8,
    kfp: Kfp = "2.16",
) -> None:
    """Train a grid of runs: table, curves with their spread, critical batch size. The same command again resumes it."""
    if backend not in ("here", "kfp"):
        raise InputError("unknown backend", field="--backend", got=backend, hint="Choose here or kfp.")
    if backend == "kfp":
        _compile_package(document, changes, output, parallel=parallel, kfp=kfp)
        return
    if out is not None and not out.is_dir():
        raise InputError("the folder does not exist", field="--out", got=str(out))
    from podscale.study.console import StudyOptions, run_study

    run_study(
        _load_study(document, changes), StudyOptions(dry_run, jobs, time_box, restart, keep_runs, out, results_only)
    )


def _load_study(document: str, changes: Sequence[str]) -> "StudyDocument":
    """Load a study with the changes of the command line in every trial."""
    from podscale.config.document import parse_overrides
    from podscale.study import read_study

    return read_study(presets.resolve_study(document), parse_overrides(changes), presets.resolve_preset)


def _compile_package(document: str, changes: Sequence[str], output: Path, *, parallel: int, kfp: str) -> None:
    if output.suffix not in (".yaml", ".yml"):
        raise InputError("the name of a pipeline package must end in .yaml", field=str(output))
    from podscale.pipelines.study_pipeline import study_package

    study = _load_study(document, changes)
    output.write_text(study_package(study, parallel=parallel, kfp=kfp), encoding="utf-8")
    print(f"{output}: the pipeline of study {study.name}")
