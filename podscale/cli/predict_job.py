"""Options of `render` and `submit` for the job of a prediction, and what the commands do with it."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podscale.errors import InputError, error_from_exit_code

if TYPE_CHECKING:
    from podscale.config import RunConfig
    from podscale.kubernetes.predict_job import PredictionJob
    from podscale.kubernetes.render import Manifest


@dataclass(frozen=True)
class PredictionOptions:
    """Options of the job of `--stage predict`."""

    images: Annotated[
        list[str] | None,
        typer.Option("--images", metavar="LOCATION", help="Of --stage predict: a path in the pods or URL; repeatable."),
    ] = None
    parts: Annotated[int | None, typer.Option(help="Of --stage predict: parts, each by a pod of its own.")] = None
    parallel: Annotated[int | None, typer.Option(help="Of --stage predict: pods at the same time; default: all.")] = (
        None
    )
    top: Annotated[int | None, typer.Option(help="Of --stage predict: classes of each image; default: 5.")] = None
    batch: Annotated[int | None, typer.Option(help="Of --stage predict, as the option of `predict`.")] = None
    convert: Annotated[bool, typer.Option("--convert", help="Of --stage predict, as the option of `predict`.")] = False
    plain: Annotated[bool, typer.Option("--plain-softmax", help="Of --stage predict, as the option of `predict`.")] = (
        False
    )

    def job(self, stage: str) -> "PredictionJob | None":
        """Return the prediction of --stage predict; None for other stages, which refuse these options."""
        named: dict[str, Any] = {name: value for name, value in vars(self).items() if _is_given(value)}
        if stage != "predict":
            if named:
                option = "--plain-softmax" if "plain" in named else f"--{next(iter(named))}"
                hint = "Add --stage predict, or leave it out."
                raise InputError("only predictions have this option", field=option, hint=hint)
            return None
        from podscale.kubernetes.predict_job import PredictionJob

        named["calibrate"] = not named.pop("plain", False)
        return PredictionJob(**{"images": (), **named})


def _is_given(value: Any) -> bool:
    """Return True if the user gave the option; 0 is a value, which the job refuses."""
    return value is not None and value is not False and value != []


def render_prediction(config: "RunConfig", job: "PredictionJob", *, from_cluster: bool) -> "list[Manifest]":
    """Return the objects of a prediction's job; with `from_cluster`, check the policy of the namespace."""
    from podscale.kubernetes.predict_job import build_predict_spec
    from podscale.kubernetes.render import render_job

    spec = build_predict_spec(config, job)
    if from_cluster:
        from podscale.kubernetes.client import connect_cluster
        from podscale.kubernetes.namespace import check_specs

        check_specs(connect_cluster(config.launch.cluster), [spec])
    return list(render_job(spec, "job").all_objects)


def submit_prediction(
    config: "RunConfig", job: "PredictionJob", *, wait: bool, dry_run: bool, stop_on_signal: bool
) -> None:
    """Submit or adopt the job of a prediction, and follow it to its end. Raises the error of a job that fails."""
    from podscale.kubernetes import retry
    from podscale.kubernetes.client import connect_cluster
    from podscale.kubernetes.namespace import check_specs
    from podscale.kubernetes.predict_job import build_predict_spec, rows_file
    from podscale.kubernetes.render import render_job
    from podscale.kubernetes.resources import title_of
    from podscale.kubernetes.run_stage import LinePrinter, follow_job, submit_manifests
    from podscale.kubernetes.submit import dry_run_job
    from podscale.kubernetes.submit_checks import check_objects

    printer = LinePrinter(sys.stdout)
    spec = build_predict_spec(config, job)
    api = connect_cluster(config.launch.cluster, policy=retry.UNATTENDED, notify=printer.notify)
    check_specs(api, [spec])
    check_objects(api, config)
    manifests = render_job(spec, "job")
    if dry_run:
        dry_run_job(api, manifests)
        print(f"{title_of(manifests.job)}: accepted by the API server, not created")
        return
    submission = submit_manifests(api, manifests, printer, lambda: check_specs(api, [spec]))
    if not wait:
        return
    result = follow_job(api, submission, "predict", printer, stop_on_signal=stop_on_signal)
    if not result.is_done:
        message = f"predictions of run {config.run.id} failed (exit code {result.exit_code}): {result.error}"
        raise error_from_exit_code(result.exit_code, message)
    print(f"rows of all images: {rows_file(config, job)} in the workspace")
