"""Checks before the first stage of a run is submitted: what the cluster lacks for all stages, by few requests."""

from collections.abc import Iterator, Sequence

from podscale.config import RunConfig
from podscale.errors import InputError, InputErrors, combine_errors
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.errors import ApiError, KindNotServed
from podscale.kubernetes.required_objects import check_namespace_exists, required_objects
from podscale.kubernetes.resources import JOB_KINDS, resource_of
from podscale.kubernetes.run_stage import build_manifests
from podscale.runs.stage_outcomes import StageName

STAGES_WITH_RANKS: tuple[StageName, ...] = ("train", "evaluate")


def check_before_submit(
    api: ClusterClient, config: RunConfig, stages: Sequence[StageName], shard_set: str | None = None
) -> None:
    """Raise InputError, or InputErrors for several, if a stage could not run; without it, the first stages would.

    What these credentials may not read is left out. `podscale doctor --cluster` checks more.
    """
    check_namespace_exists(api)
    errors = [error for stage in stages for error in _stage_errors(api, config, stage, shard_set)]
    errors += _object_errors(api, config, queued=not set(STAGES_WITH_RANKS).isdisjoint(stages))
    if errors:
        raise combine_errors(errors, "this run cannot be submitted")  # stages share problems


def _stage_errors(
    api: ClusterClient, config: RunConfig, stage: StageName, shard_set: str | None
) -> Sequence[InputError]:
    """Return the errors if the stage's job cannot be rendered, or the cluster does not have its kind of job."""
    try:
        kind = resource_of(build_manifests(api, config, stage, shard_set).job)
        if kind == JOB_KINDS["job"] or api.serves(kind):
            return ()
        return (_missing_operator_error(config, stage, api.missing_error(kind)),)
    except InputErrors as several:
        return several.errors
    except ApiError:
        return ()  # the kinds of job may not be read
    except InputError as error:
        return (error,)


def _missing_operator_error(config: RunConfig, stage: StageName, missing: KindNotServed) -> InputError:
    return InputError(
        f"the {stage} stage needs a {missing.field}: {missing.problem}",
        field="launch.backend",
        got=config.launch.backend,
        hint=missing.hint,
    )


def check_objects(api: ClusterClient, config: RunConfig) -> None:
    """Raise InputError, or InputErrors for several, if the namespace lacks what a job on the hardware refers to."""
    check_namespace_exists(api)
    if errors := list(_object_errors(api, config, queued=True)):
        raise combine_errors(errors, "this job cannot be submitted")


def _object_errors(api: ClusterClient, config: RunConfig, *, queued: bool) -> Iterator[InputError]:
    """Yield the error of each object that the document names and the namespace lacks."""
    for required in required_objects(api, config, queued=queued):
        if required.result.verdict == "missing":
            advice = required.result.advice
            hint = f"{advice[:1].upper()}{advice[1:]}"
            yield InputError(required.result.found, field=required.field, got=required.name, hint=hint)
