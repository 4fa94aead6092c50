"""Reader of a metrics endpoint, as Prometheus would."""

import time
import urllib.error
import urllib.request

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from podscale.telemetry.catalogue import CATALOGUE, PREFIX, MetricSpec
from tests.support.commands import Command


def scrape(url: str) -> str:
    """Return the endpoint's current text; empty if no process listens."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return ""


def final_text(command: Command, url: str) -> str:
    """Scrape a stage until it exits after its last scrape; return the last text."""
    text = ""
    while command.process.poll() is None:
        text = scrape(url) or text
        time.sleep(0.2)
    return text


def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def foreign(text: str) -> list[str]:
    """Return violations of the catalogue in an exposition: unknown names, wrong types, labels or label values."""
    problems = []
    for family in families(text):
        entry = CATALOGUE.get(family.name.removeprefix(PREFIX))
        if entry is None or family.type != ("gauge" if entry.kind == "info" else entry.kind):
            problems.append(f"{family.name}: {family.type} is not in the catalogue")
            continue
        problems += [f"{sample.name}{sample.labels}" for sample in family.samples if not _allowed(entry, sample.labels)]
    return problems


def names(text: str) -> set[str]:
    """Return the catalogue names of the metrics that have samples."""
    return {family.name.removeprefix(PREFIX) for family in families(text) if family.samples}


def _allowed(entry: MetricSpec, labels: dict[str, str]) -> bool:
    common = set(entry.labels) - set(entry.own_labels)
    if not common <= set(labels):
        return False
    series_labels = {name: value for name, value in labels.items() if name not in common and name != "le"}
    if entry.kind == "info":
        return bool(series_labels)
    return set(series_labels) == set(entry.own_labels) and all(
        not entry.own_labels[n] or value in entry.own_labels[n] for n, value in series_labels.items()
    )
