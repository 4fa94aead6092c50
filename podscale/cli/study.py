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
    """Return the completions of STUDY: studies, documents and folders."""
    names = [name for name in presets.study_names() if name.startswith(incomplete)]
    return names + complete_document(incomplete)


@app.command()
def study(
    document: Annotated[
        str,
        typer.Argument(
            metavar="STUDY", help="Study document: a path or the name of one here.", autocompletion=complete_study
        ),
    ],
    changes: Set = [],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print trials, estimate and what is left out; start nothing.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Trials at a time; 0 = as many as the cores carry.", min=0)] = 0,
    time_box: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="Begin no trial that would end later than this.", min=0.01)
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Forget the results there are, and run all anew.")] = False,
    keep_runs: Annotated[bool, typer.Option("--keep-runs", help="Leave the run directories of the trials.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the results here too, as files to commit.")
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="here|kfp", help="kfp: compile a package whose small jobs run the trials.")
    ] = "here",
    output: Annotated[Path, typer.Option("--output", "-o", help="With --backend kfp: file to write.")] = Path(
        "study.yaml"
    ),
    parallel: Annotated[int, typer.Option(help="With --backend kfp: pods at a time.", min=1)] = 8,
    kfp: Kfp = "2.16",
) -> None:
    """A grid of runs: table, curves with their spread, critical batch size. The same command again continues."""
    if backend not in ("here", "kfp"):
        problem = "trials run `here`, or in the pods of a package for `kfp`"
        raise InputError(problem, field="--backend", got=backend)
    if backend == "kfp":
        _compile_package(document, changes, output, parallel=parallel, kfp=kfp)
        return
    if out is not None and not out.is_dir():
        raise InputError("the folder does not exist", field="--out", got=str(out))
    from podscale.study.console import StudyOptions, run_study

    run_study(_load_study(document, changes), StudyOptions(dry_run, jobs, time_box, restart, keep_runs, out))


def _load_study(document: str, changes: Sequence[str]) -> "StudyDocument":
    """Load a study with the changes of the command line in every trial."""
    from podscale.config.document import parse_overrides
    from podscale.study import read_study

    return read_study(presets.resolve_study(document), parse_overrides(changes), presets.resolve_preset)


def _compile_package(document: str, changes: Sequence[str], output: Path, *, parallel: int, kfp: str) -> None:
    if output.suffix not in (".yaml", ".yml"):
        raise InputError("a pipeline package ends in .yaml", field=str(output))
    from podscale.pipelines.study_pipeline import study_package

    study = _load_study(document, changes)
    output.write_text(study_package(study, parallel=parallel, kfp=kfp), encoding="utf-8")
    print(f"{output}: the pipeline of study {study.name}")
