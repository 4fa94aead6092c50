"""What a Prometheus of one's own scrapes: the endpoints of the runs below a folder, each in its own way."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podscale.runs import RunDirectory
from podscale.telemetry.endpoint import ClientCertFiles, Endpoint, EndpointError

JOB_NAME = "podscale"
NAME_TIMEOUT_SECONDS = 2.0
"""Time limit for an endpoint to show its certificate."""


@dataclass(frozen=True)
class ScrapeIntervals:
    """Whole seconds between two scrapes, and between two looks at the rules."""

    scrape_seconds: int = 2
    evaluation_seconds: int = 5


DEFAULT_INTERVALS = ScrapeIntervals()


@dataclass(frozen=True)
class ScrapeTarget:
    """One endpoint. certificate_name: by which Prometheus, which compares names, knows its certificate; None: by its
    address.
    """

    endpoint: Endpoint
    certificate_name: str | None = None


def find_endpoints(runs: Path) -> list[Endpoint]:
    """Those that are served now by runs below a folder (or by the run that it is)."""
    directories = [RunDirectory(runs), *(RunDirectory(path) for path in sorted(runs.glob("*")))]
    found = [Endpoint.read(run.endpoint) for run in directories]
    return [endpoint for endpoint in found if endpoint is not None]


def build_targets(
    found: Iterable[Endpoint], known: Iterable[ScrapeTarget], client: ClientCertFiles | None
) -> list[ScrapeTarget]:
    """The endpoints as targets; one that does not answer yet is left out. known: those of the last look."""
    before = {target.endpoint: target for target in known}
    made = []
    for endpoint in found:
        if endpoint not in before:
            try:
                before[endpoint] = ScrapeTarget(endpoint, endpoint.certificate_name(NAME_TIMEOUT_SECONDS, client))
            except EndpointError:
                before[endpoint] = ScrapeTarget(endpoint)  # Prometheus will say why
            except OSError:
                continue
        made.append(before[endpoint])
    return made


def prometheus_configuration(
    folder: Path, found: Iterable[ScrapeTarget], intervals: ScrapeIntervals, client: ClientCertFiles | None = None
) -> dict[str, Any]:
    """What Prometheus reads at its start, and again whenever the targets change."""
    return {
        "global": {
            "scrape_interval": f"{intervals.scrape_seconds}s",
            "evaluation_interval": f"{intervals.evaluation_seconds}s",
        },
        "rule_files": [str(folder / "rules.yml")],
        "scrape_configs": [_scrape_config(target, client) for target in found],
    }


def _scrape_config(target: ScrapeTarget, client: ClientCertFiles | None) -> dict[str, Any]:
    """How one endpoint is scraped; Prometheus knows TLS and credentials of such a job alone, not of single targets."""
    endpoint = target.endpoint
    scraping: dict[str, Any] = {
        "job_name": f"{JOB_NAME} {endpoint.url}",
        "static_configs": [{"targets": [endpoint.address], "labels": {"job": JOB_NAME}}],
    }
    if endpoint.certificate is not None:
        tls = {"ca_file": str(endpoint.certificate)}
        tls |= {"server_name": target.certificate_name} if target.certificate_name else {}
        tls |= {"cert_file": str(client.certificate), "key_file": str(client.key)} if client else {}
        scraping |= {"scheme": "https", "tls_config": tls}
    if endpoint.token_file is not None:
        scraping["authorization"] = {"credentials_file": str(endpoint.token_file)}
    return scraping
