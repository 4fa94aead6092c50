"""`podscale study`: a grid of small runs, on this machine, or as a package for KFP or an Experiment of Katib."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli.documents import check_policy
from podscale.cli.options import (
    ClusterOptions,
    Defaults,
    Kfp,
    Set,
    check_package_file,
    complete_document,
    expand_option_groups,
    open_output_folder,
    write_output,
)
from podscale.errors import InputError
from podscale.pipelines import presets

if TYPE_CHECKING:
    from podscale.config import Defaults as DefaultValues
    from podscale.config import RunConfig
    from podscale.study import StudyDocument

app = typer.Typer()

BACKENDS = ("here", "kfp", "katib")
HERE, PACKAGE, EXPERIMENT = ("here",), ("kfp",), ("katib",)


@dataclass(frozen=True)
class StudyPackageOptions:
    """Options of a study that runs on a cluster."""

    backend: Annotated[
        str,
        typer.Option(
            metavar="|".join(BACKENDS),
            help="kfp: compile a package that runs the trials in small jobs; katib: write an Experiment, if the "
            "cluster has Katib.",
        ),
    ] = "here"
    output: Annotated[Path, typer.Option("--output", "-o", help="With kfp and katib: file to write.")] = Path(
        "study.yaml"
    )
    parallel: Annotated[int, typer.Option(help="With kfp and katib: pods in parallel.", min=1)] = 8
    kfp: Kfp = "2.16"
    algorithm: Annotated[
        str, typer.Option(help="With katib: grid, random, tpe or another of its search algorithms.")
    ] = "grid"
    trials: Annotated[
        int | None, typer.Option(help="With katib: most trials; default: as many as the grid has.", min=1)
    ] = None
    defaults: Defaults = None


USED_WITH: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("output", "parallel", "defaults", "namespace", "context"), PACKAGE + EXPERIMENT),
    **dict.fromkeys(("algorithm", "trials"), EXPERIMENT),
    "kfp": PACKAGE,
    **dict.fromkeys(("dry_run", "jobs", "time_box", "restart", "keep_runs", "out", "results_only"), HERE),
}
"""Backends that use an option; all use the others."""


def complete_study(incomplete: str) -> list[str]:
    """Return the completions of STUDY: included studies, documents and folders."""
    names = [name for name in presets.study_names() if name.startswith(incomplete)]
    return names + complete_document(incomplete)


def check_options(click_context: typer.Context, backend: str) -> None:
    """Raise InputError if an option is given that the backend does not use."""
    for option in click_context.command.params:
        backends = USED_WITH.get(str(option.name), BACKENDS)
        source = click_context.get_parameter_source(str(option.name))
        if backend not in backends and source is not None and source.name == "COMMANDLINE":
            raise InputError(
                f"has no effect with --backend {backend}",
                field=option.opts[0],
                hint=f"Leave it out, or choose {' or '.join(f'--backend {name}' for name in backends)}.",
            )


@app.command()
@expand_option_groups
def study(
    click_context: typer.Context,
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
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the results here too, as files to commit; created if missing. An unfinished study continues "
            "from its files here.",
        ),
    ] = None,
    results_only: Annotated[
        bool, typer.Option("--results-only", help="Write the results of the trials so far; run nothing.")
    ] = False,
    *,
    package: StudyPackageOptions,
    cluster: ClusterOptions,
) -> None:
    """Train a grid of runs: table, curves with their spread, critical batch size. The same command again resumes it."""
    if package.backend not in BACKENDS:
        hint = f"Choose {', '.join(BACKENDS)}."
        raise InputError("unknown backend", field="--backend", got=package.backend, hint=hint)
    check_options(click_context, package.backend)
    if package.backend != "here":
        _write_package(document, changes, package, cluster)
        return
    from podscale.study.console import StudyOptions, run_study

    loaded = _load_study(document, changes)
    if out is not None and not dry_run:
        open_output_folder(out)
    run_study(loaded, StudyOptions(dry_run, jobs, time_box, restart, keep_runs, out, results_only))


def _load_study(document: str, changes: Sequence[str], defaults: "DefaultValues | None" = None) -> "StudyDocument":
    """Load a study with the changes of the command line in every trial."""
    from podscale.config.document import parse_overrides
    from podscale.study import read_study

    return read_study(presets.resolve_study(document), parse_overrides(changes), presets.resolve_preset, defaults)


def _write_package(
    document: str, changes: Sequence[str], package: StudyPackageOptions, cluster: ClusterOptions
) -> None:
    """Write the study as a package for Kubeflow Pipelines, or as an Experiment of Katib."""
    check_package_file(package.output)
    from podscale.api.documents import read_defaults
    from podscale.study.grid import TrialGrid

    defaults = read_defaults(package.defaults, cluster.namespace, cluster.context)
    study = _load_study(document, [*changes, *cluster.changes], defaults)
    config = TrialGrid(study).series[0].config
    check_policy(config, package.defaults)
    text = _experiment(study, config, package) if package.backend == "katib" else _kfp_package(study, package)
    write_output(package.output, text)
    print(f"{package.output}: study {study.name} for {package.backend}")


def _kfp_package(study: "StudyDocument", package: StudyPackageOptions) -> str:
    from podscale.pipelines.study_pipeline import study_package

    text: str = study_package(study, parallel=package.parallel, kfp=package.kfp)
    return text


def _experiment(study: "StudyDocument", config: "RunConfig", package: StudyPackageOptions) -> str:
    """Return the Experiment. Raises InputError if the cluster of the document has no Katib."""
    from podscale.kubernetes.client import connect_cluster
    from podscale.kubernetes.render.common import to_yaml
    from podscale.pipelines.study_experiment import ExperimentOptions, check_katib, study_experiment

    check_katib(connect_cluster(config.launch.cluster))
    options = ExperimentOptions(package.algorithm, package.parallel, package.trials)
    return to_yaml([study_experiment(study, options)])
