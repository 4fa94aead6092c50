"""Command line application with all commands."""

import os
import shlex
import sys
from functools import cache
from typing import Annotated, Any

import typer

from podscale.cli import (
    bench,
    doctor,
    documents,
    export,
    jobs,
    monitoring,
    pipeline,
    predict,
    run,
    serve,
    stages,
    study,
    tpu,
    watch,
)
from podscale.errors import ExitCode, JobAbandoned, PodscaleError
from podscale.util import env
from podscale.util.processes import preempt_on_sigterm
from podscale.version import VERSION

EXIT_CODES = (
    "Exit codes: 0 done; 1 failed; 2 bad input, nothing was started; 75 stopped after saving, the same command "
    "continues; 76 hang detected; 77 a peer was lost; 130 interrupted."
)

UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Error of a wrong option: click's class, or that of newer versions of typer, which include click."""

app = typer.Typer(
    name="podscale",
    help="Train image classifiers at supercomputer scale on Kubernetes, and on this machine. One document "
    "(YAML) describes a run; without one, commands use the embedded digits.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for subject in (run, stages, predict, export, serve, study, documents, jobs, doctor, watch, monitoring):
    app.add_typer(subject.app)  # without a name: its commands are at the top level
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(bench.app, name="bench")
app.add_typer(tpu.app, name="tpu")


@app.callback(invoke_without_command=True)
def _root_command(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"podscale {VERSION}")
        raise typer.Exit


@cache
def _command() -> Any:
    """Return the click command of the application, built once for callers of `main` that call it often."""
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    command = ["podscale", *(sys.argv[1:] if arguments is None else arguments)]
    os.environ[env.COMMAND] = shlex.join(command)  # for environment.json
    try:
        with preempt_on_sigterm():
            result = _command()(args=arguments, prog_name="podscale", standalone_mode=False)
        return result if isinstance(result, int) else int(ExitCode.DONE)
    except JobAbandoned as error:
        print(f"podscale: {error}", file=sys.stderr)
        return int(ExitCode.DONE)
    except PodscaleError as error:
        print(f"podscale: {error}", file=sys.stderr)
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print("podscale: interrupted", file=sys.stderr)
        return 130
    except UsageError as error:
        error.show()
        return int(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader (head, less) has exited
        return int(ExitCode.DONE)
