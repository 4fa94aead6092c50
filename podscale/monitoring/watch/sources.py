"""Sources of a run's records and metrics: its directory, or its job on a cluster."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from typing import Protocol

import yaml

from podscale.config.telemetry import TelemetrySection
from podscale.errors import PodscaleError
from podscale.kubernetes import retry
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.errors import ApiError
from podscale.kubernetes.job_spec import METRICS_PORT
from podscale.kubernetes.job_watcher import JobObserver
from podscale.kubernetes.jobs import JobEntry
from podscale.kubernetes.logs import ContainerLog, LogFollower
from podscale.kubernetes.pod_state import first_pod, is_running
from podscale.kubernetes.resources import PODS, KubernetesObject, name_of, title_of
from podscale.kubernetes.transport import StreamInterrupted
from podscale.runs import RunDirectory, is_held, read_outcomes
from podscale.telemetry.endpoint import ClientCertFiles, Endpoint, EndpointError
from podscale.telemetry.events import EventRecord, FileTail, parse_record
from podscale.util import env
from podscale.util.formatting import printable

SCRAPE_TIMEOUT_SECONDS = 2.0
MAX_PODS = 32
"""Maximum number of pods whose metrics are read; more ranks do not fit a screen."""
NO_RANK_METRICS = "no per-rank metrics"


class RunSource(Protocol):
    """Run to watch; `name` is its display name."""

    name: str

    def records(self) -> list[EventRecord]:
        """Return the records added since the last call."""

    def expositions(self) -> Mapping[str, str]:
        """Return the metrics text of each pod that answers."""

    def headline(self) -> str:
        """Return a note on the run's state beyond its records; may be empty."""

    def has_ended(self) -> bool:
        """Return True if no more records will follow."""

    def close(self) -> None: ...


class DirectorySource:
    """Run with a directory on this machine or mounted here."""

    def __init__(self, run: RunDirectory, client: ClientCertFiles | None = None) -> None:
        self.name = str(run.path)
        self._run, self._client = run, client
        self._denied_endpoint = ""
        self._lines = FileTail(run.metrics, from_start=True)

    def records(self) -> list[EventRecord]:
        return [record for line in self._lines.read_lines() if (record := parse_record(line)) is not None]

    def expositions(self) -> Mapping[str, str]:
        endpoint = Endpoint.read(self._run.endpoint)
        self._denied_endpoint = ""
        try:
            return {"": endpoint.fetch_metrics(SCRAPE_TIMEOUT_SECONDS, self._client)} if endpoint is not None else {}
        except EndpointError as error:
            self._denied_endpoint = f"{NO_RANK_METRICS}: {error}"
        except OSError:  # it has exited, or is busy
            pass
        return {}

    def headline(self) -> str:
        if is_held(self._run.lease):
            return self._denied_endpoint
        failed = [outcome for outcome in read_outcomes(self._run.outcome).values() if not outcome.is_done]
        if failed:
            return f"{failed[-1].stage} ended with exit code {failed[-1].exit_code}: {failed[-1].error}"
        return "no process writes it now"

    def has_ended(self) -> bool:
        return not is_held(self._run.lease)

    def close(self) -> None:
        """Nothing is held open."""


class JobSource:
    """Job on a cluster: records from the log of rank 0, metrics through the API server if it permits that.

    Without `follow`, the current state of the job is read once.
    """

    def __init__(self, api: ClusterClient, entry: JobEntry, *, follow: bool) -> None:
        self.name = f"{title_of(entry.job)} in namespace {api.namespace}"
        self._api, self._entry = api, entry
        self._lines: deque[str] = deque()
        self._refused = ""
        self._endpoint_settings: TelemetrySection | None = None  # read from the first pod
        self._closing = ExitStack()
        self._observer: JobObserver | None = None
        if follow:
            retrying = api.with_retry(retry.UNATTENDED, self._ignore_notice)
            self._observer = self._closing.enter_context(closing(JobObserver(retrying, entry.job)))
            follower = LogFollower(retrying, self._observer.pods, self._lines.append, self._ignore_notice)
            self._follower = self._closing.enter_context(closing(follower))
        elif (pod := first_pod(entry.pods)) is not None:
            with suppress(ApiError, StreamInterrupted):
                self._lines.extend(map(printable, ContainerLog(api, pod, self._ignore_notice).lines(pod, follow=False)))

    def records(self) -> list[EventRecord]:
        records = []
        while self._lines:
            if (record := parse_record(self._lines.popleft().encode())) is not None:
                records.append(record)
        return records

    def expositions(self) -> Mapping[str, str]:
        if self._refused:
            return {}
        pods = [name_of(pod) for pod in self._pods() if is_running(pod)][:MAX_PODS]
        if self._endpoint_settings is None and pods:
            self._read_endpoint_settings(pods[0])
        if self._endpoint_settings is None or self._refused:
            return {}
        texts: dict[str, str] = {}
        threads = [threading.Thread(target=self._scrape, args=(pod, texts), daemon=True) for pod in pods]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 2 * SCRAPE_TIMEOUT_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return dict(texts)

    def headline(self) -> str:
        state = self._observer.state() if self._observer else self._entry.state
        return " - ".join(part for part in (str(state), self._refused) if part)

    def has_ended(self) -> bool:
        if self._observer is None:
            return True
        if not self._observer.state().is_finished:
            return False
        self._follower.finish(30.0)
        return True

    def close(self) -> None:
        self._closing.close()

    def _pods(self) -> list[dict[str, object]]:
        return list(self._observer.pods() if self._observer else self._entry.pods)

    def _read_endpoint_settings(self, pod: str) -> None:
        """Read from a pod's document how the pods serve metrics."""
        with suppress(PodscaleError):
            self._endpoint_settings = _telemetry_section(self._api.get(PODS, pod))
            if self._endpoint_settings.bearer_token_file is not None:
                self._refused = f"{NO_RANK_METRICS}: they require a token, which the API server does not forward"
            elif self._endpoint_settings.tls_client_ca is not None:
                self._refused = f"{NO_RANK_METRICS}: they require a client certificate, and the API server has none"

    def _scrape(self, pod: str, texts: dict[str, str]) -> None:
        assert self._endpoint_settings is not None
        tls = self._endpoint_settings.tls_certificate is not None
        try:
            texts[pod] = self._api.proxy_get(pod, METRICS_PORT, "metrics", SCRAPE_TIMEOUT_SECONDS, tls=tls)
        except ApiError as error:
            if error.status == 403:
                self._refused = f"{NO_RANK_METRICS}: these credentials are not allowed to get pods/proxy"
        except PodscaleError:
            return

    def _ignore_notice(self, text: str) -> None:
        """Ignore notices of outages, because the state of the job shows them."""


def _telemetry_section(pod: KubernetesObject) -> TelemetrySection:
    """Return the telemetry section of a pod's document; defaults if the document is unreadable."""
    for container in pod["spec"].get("containers", ()):
        for variable in container.get("env", ()):
            if variable["name"] == env.RUN_DOCUMENT:
                with suppress(yaml.YAMLError, ValueError, TypeError, AttributeError):
                    return TelemetrySection.model_validate(yaml.safe_load(variable["value"]).get("telemetry", {}))
    return TelemetrySection()
