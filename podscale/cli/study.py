"""Studies: grids of small runs that answer a question."""

from pathlib import Path
from typing import Annotated

import typer

from podscale.cli.options import Kfp, Set

app = typer.Typer()


def complete_study(incomplete: str) -> list[str]:
    """What a shell offers for STUDY."""
    from podscale.pipelines import presets

    files = [str(path) for path in Path().glob(f"{incomplete}*") if path.suffix in (".yaml", ".yml") or path.is_dir()]
    return [name for name in presets.study_names() if name.startswith(incomplete)] + files


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
        bool, typer.Option("--dry-run", help="Print cells, estimate and what is left out; start nothing.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Cells at a time; 0 = as many as the cores carry.", min=0)] = 0,
    time_box: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="Begin no cell that would end later than this.", min=0.01)
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Forget the results there are, and run all anew.")] = False,
    keep_runs: Annotated[bool, typer.Option("--keep-runs", help="Leave the run directories of the cells.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the results here too, as files to commit.")
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="here|kfp", help="kfp: compile a package whose small jobs run the cells.")
    ] = "here",
    output: Annotated[Path, typer.Option("--output", "-o", help="With --backend kfp: file to write.")] = Path(
        "study.yaml"
    ),
    parallel: Annotated[int, typer.Option(help="With --backend kfp: pods at a time.", min=1)] = 8,
    kfp: Kfp = "2.16",
) -> None:
    """A grid of runs: table, curves with their spread, critical batch size. The same command again continues."""
    from podscale.commands.study import StudyOptions, compile_study_package, run_study

    if backend == "kfp":
        return compile_study_package(document, changes, output, parallel=parallel, kfp=kfp)
    options = StudyOptions(jobs, time_box, restart=restart, keep_runs=keep_runs, out=out)
    return run_study(document, changes, options, dry_run=dry_run, backend=backend)
