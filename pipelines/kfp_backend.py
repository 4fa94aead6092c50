"""KFP backend through kfp's own client, whose output is suppressed and whose exceptions become one-line errors."""

import contextlib
import hashlib
import io
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podscale.errors import InputError, PodscaleError
from podscale.pipelines.kfp_endpoint import BackendUnreachable, KfpEndpoint, credentials_error, probe_backend
from podscale.pipelines.kfp_runs import PipelineProgress, RunReader

OUTAGE_SECONDS = 600.0
"""Longest outage of the backend while following a run, seconds."""
FINISHED_STATES = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
_EQUALS = 1


@dataclass(frozen=True)
class PipelineVersion:
    """One version of a pipeline in the backend; `new` is False if the same package was uploaded before."""

    pipeline_id: str
    version_id: str
    name: str
    link: str
    new: bool


@dataclass(frozen=True)
class RunRequest:
    """A run of an uploaded version, to be started now or by a schedule."""

    version: PipelineVersion
    name: str
    experiment: str
    parameters: dict[str, Any]
    service_account: str | None = None

    @property
    def client_options(self) -> dict[str, Any]:
        """Arguments of kfp's client."""
        version = {"pipeline_id": self.version.pipeline_id, "version_id": self.version.version_id}
        return {"params": self.parameters, "service_account": self.service_account, **version}


@dataclass(frozen=True)
class StartedRun:
    """A run or schedule that the backend has accepted."""

    id: str
    name: str
    link: str


class KfpBackend:
    """A reachable KFP backend; created by `connect_backend`."""

    def __init__(self, endpoint: KfpEndpoint, client: Any) -> None:
        self.endpoint = endpoint
        self._client = client  # kfp.client.Client, whose generated parts have no types
        self._runs = RunReader(client)

    def upload(self, package: str, pipeline: str, version: str, description: str) -> PipelineVersion:
        """Upload `package` (YAML) as a version of the pipeline; create the pipeline if it does not exist.

        The version's name ends in a hash of the package, so that the same package is never uploaded twice.
        """
        name = f"{version}-{hashlib.sha256(package.encode()).hexdigest()[:8]}"
        with self._translate_errors(f"upload pipeline {pipeline}"):
            pipeline_id = self._pipeline_id(pipeline, description)
            existing = self._version_id(pipeline_id, name)
            version_id = existing or self._upload_package(package, pipeline_id, name, description)
        link = self.endpoint.link(f"pipelines/details/{pipeline_id}/version/{version_id}")
        return PipelineVersion(pipeline_id, version_id, name, link, new=existing is None)

    def run(self, request: RunRequest) -> StartedRun:
        with self._translate_errors(f"start run {request.name}"):
            experiment_id = self._experiment_id(request.experiment)
            run = self._client.run_pipeline(experiment_id, request.name, **request.client_options)
        return StartedRun(run.run_id, request.name, self.endpoint.link(f"runs/details/{run.run_id}"))

    def schedule(self, request: RunRequest, cron: str, *, replace: bool = False) -> StartedRun:
        """Schedule runs one at a time, without catching up on missed times; `cron` has six fields, seconds first.

        Raises InputError if there is a schedule of this name and `replace` is False.
        """
        with self._translate_errors(f"schedule {request.name}"):
            experiment_id = self._experiment_id(request.experiment)
            existing = self._schedules(experiment_id, request.name)
            if existing and not replace:
                raise InputError(
                    f"experiment {request.experiment} has a schedule of this name: {self._schedule_link(existing[0])}",
                    field=f"schedule {request.name}",
                    hint="Use --replace or another --name.",
                )
            created = self._client.create_recurring_run(
                experiment_id,
                request.name,
                cron_expression=cron,
                max_concurrency=1,
                no_catchup=True,
                **request.client_options,
            )
            for schedule_id in existing:  # last, so that they survive if the new one is rejected
                self._client.delete_recurring_run(schedule_id)
        schedule_id = created.recurring_run_id
        return StartedRun(schedule_id, request.name, self._schedule_link(schedule_id))

    def _schedule_link(self, schedule_id: str) -> str:
        return str(self.endpoint.link(f"recurringrun/details/{schedule_id}"))

    def follow(self, run_id: str, on_change: Callable[[PipelineProgress], None], *, poll_seconds: float = 5.0) -> str:
        """Wait until a run has finished and return its state; call `on_change` with every change of the progress.

        Raises PodscaleError if the backend is unreachable for OUTAGE_SECONDS, and InputError if it no longer accepts
        the credentials.
        """
        last: PipelineProgress | None = None
        answered_at = time.monotonic()
        while True:
            try:
                with self._translate_errors("read the run"):
                    progress: PipelineProgress = self._runs.progress(run_id)
                answered_at = time.monotonic()
                if progress != last:
                    on_change(progress)
                    last = progress
                if progress.state in FINISHED_STATES:
                    return str(progress.state)
            except BackendUnreachable as error:
                if time.monotonic() - answered_at > OUTAGE_SECONDS:
                    hint = "The run itself continues. Check it later."
                    raise PodscaleError(error.problem, field=error.field, got=error.got, hint=hint) from error
            time.sleep(poll_seconds)

    def stage_errors(self, run_id: str) -> list[str]:
        """Return the stages' own errors, as far as the backend has them."""
        with self._translate_errors("read the errors of the run"):
            errors: list[str] = self._runs.stage_errors(run_id)
        return errors

    def _pipeline_id(self, name: str, description: str) -> str:
        listed = self._client.pipelines.pipeline_service_list_pipelines(
            filter=_name_filter(name), **({"namespace": self.endpoint.namespace} if self.endpoint.namespace else {})
        )
        if listed.pipelines:
            return str(listed.pipelines[0].pipeline_id)
        body = self._client.api_models.V2beta1Pipeline(
            display_name=name, name=name, description=description, namespace=self.endpoint.namespace or None
        )
        return str(self._client.pipelines.pipeline_service_create_pipeline(pipeline=body).pipeline_id)

    def _version_id(self, pipeline_id: str, name: str) -> str | None:
        listed = self._client.list_pipeline_versions(pipeline_id, filter=_name_filter(name))
        return str(listed.pipeline_versions[0].pipeline_version_id) if listed.pipeline_versions else None

    def _upload_package(self, package: str, pipeline_id: str, name: str, description: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pipeline.yaml"
            path.write_text(package, encoding="utf-8")
            options = {"pipeline_id": pipeline_id, "description": description}
            return str(self._client.upload_pipeline_version(str(path), name, **options).pipeline_version_id)

    def _experiment_id(self, name: str) -> str:
        return str(self._client.create_experiment(name, namespace=self.endpoint.namespace or None).experiment_id)

    def _schedules(self, experiment_id: str, name: str) -> list[str]:
        listed = self._client.list_recurring_runs(experiment_id=experiment_id, page_size=100, filter=_name_filter(name))
        return [str(schedule.recurring_run_id) for schedule in listed.recurring_runs or ()]

    @contextlib.contextmanager
    def _translate_errors(self, action: str) -> Iterator[None]:
        """Translate the client's exceptions into Podscale's errors and suppress its output."""
        import urllib3
        from kfp_server_api import ApiException  # type: ignore[import-untyped]

        try:
            with _silence_kfp():
                yield
        except ApiException as error:
            raise self._error_of_answer(error, action) from error
        except urllib3.exceptions.HTTPError as error:
            problem = f"could not {action}: no answer: {_connection_error(error)}"
            raise BackendUnreachable(problem, field=self.endpoint.host) from error

    def _error_of_answer(self, answer: Any, action: str) -> PodscaleError:
        message = _error_message(answer.body) or str(answer.reason)
        error: PodscaleError
        if answer.status in (401, 403):
            error = credentials_error(self.endpoint, answer.status, message)
            return error
        if not answer.status or answer.status >= 500 or answer.status == 429:
            error = BackendUnreachable(f"could not {action}: HTTP {answer.status}: {message}", field=self.endpoint.host)
            return error
        hint = {
            400: "Podscale's packages need KFP 2.15 or newer.",
            404: "It may have been deleted.",
            409: "Another client created it at the same time. Run the same command again.",
        }.get(answer.status, "")
        return InputError(f"could not {action}: {message}", field=self.endpoint.host, hint=hint)


def connect_backend(endpoint: KfpEndpoint) -> KfpBackend:
    """Probe the backend and return a client of it. Raises as kfp_endpoint.probe_backend does."""
    multi_user = probe_backend(endpoint)
    if multi_user and not endpoint.namespace:
        hint = "Set your namespace with --namespace."
        raise InputError("several users share this KFP", field=endpoint.host, hint=hint)
    with _silence_kfp():
        from kfp.client import Client

        client = Client(
            host=endpoint.host,
            namespace=endpoint.namespace or "kubeflow",
            cookies=endpoint.cookies or None,
            ssl_ca_cert=str(endpoint.ca_file) if endpoint.ca_file else None,
            credentials=_token_refresher(endpoint),
        )
    return KfpBackend(endpoint, client)


def _token_refresher(endpoint: KfpEndpoint) -> Any:
    """Return kfp credentials that read the token again before every request; None without a token."""
    if not endpoint.token and endpoint.token_file is None:
        return None
    from kfp.client.token_credentials_base import TokenCredentialsBase

    class RefreshedToken(TokenCredentialsBase):
        def refresh_api_key_hook(self, config: Any) -> None:
            config.api_key["authorization"] = endpoint.read_token()

    return RefreshedToken()


def _name_filter(name: str) -> str:
    """Return KFP's filter for objects of this display name."""
    return json.dumps({"predicates": [{"operation": _EQUALS, "key": "display_name", "stringValue": name}]})


def _error_message(body: Any) -> str:
    """Return the first line of the message in KFP's error response."""
    try:
        answer = json.loads(body)
        text = str(answer.get("message") or answer.get("error_message") or answer.get("error") or "")
    except (ValueError, TypeError, AttributeError):
        return ""
    return text.splitlines()[0][:500] if text else ""


def _connection_error(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason if reason is not None else error).partition(": ")[2] or str(error)


@contextlib.contextmanager
def _silence_kfp() -> Iterator[None]:
    """Suppress the client's printed links, warnings and logged tracebacks."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
