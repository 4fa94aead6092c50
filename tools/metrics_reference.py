"""Write docs/reference/metrics.md from catalogue, rules and dashboards: `python tools/metrics_reference.py`."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from podscale.telemetry.catalogue import METRICS, MetricSpec

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "reference" / "metrics.md"
RULES = ROOT / "charts" / "podscale" / "rules"
DASHBOARDS = ROOT / "charts" / "podscale" / "dashboards"
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
WORD = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")

EXPORTERS = {
    "every rank": (
        "Every rank",
        "Each training or evaluating process exports its own part; the value of a run is the sum over its ranks. "
        "Labels `run` and `rank`.",
    ),
    "rank 0": ("Rank 0", "Values of the whole run; the label `rank` is always 0."),
    "sharding": ("Shard stage", "Each packing pod exports its own part. Label `run`."),
    "supervisor": ("Supervisor", "The parent process of a stage, one in every pod. Label `run`."),
    "server": (
        "Server of predictions",
        "Each process of a [server](../how-to/serve.md) exports its own part, on the port of the predictions. Labels "
        "`model` and `process`.",
    ),
}

HEAD = """# Metrics

Prometheus series of a run, with the panels and rules that use each. Generated from `podscale/telemetry/catalogue.py`,
the rules and the dashboards by `tools/metrics_reference.py`; a test keeps it true, and another that a real training
exports these series with these labels and no others.

A stage serves them at `/metrics` while it runs; `telemetry.address` and `telemetry.port` say where. Counters exist at 0
from the start. A series that is not known does not exist: nothing is reported as 0 or -1 for want of a value. Rates are
Prometheus' to make: images a second are `sum by (run) (rate(podscale_train_images_total[5m]))`.
"""

SERVING = """## Serving

The parent process of a stage serves the metrics of sharding, training and evaluation. Ranks write theirs into a file
once a second, and only the parent answers scrapers. It serves only `/metrics`, with time limits, to at most 32 clients
at once; for another client it closes the oldest connection, so idle clients cannot block the endpoint. Pods serve at
port 9464 (the container port `metrics`); on your own machine a free port is chosen and printed.

| to get | set |
|---|---|
| HTTPS | `telemetry.tls_certificate`, `telemetry.tls_key`: PEM files |
| only scrapers with a certificate (mTLS) | `telemetry.tls_client_ca`: the authority of their certificates |
| only scrapers with a token | `telemetry.bearer_token_file` |
| a scrape of the last values of a stage | `telemetry.linger_seconds`, for example two scrape intervals |
| pushes of short stages | `telemetry.pushgateway`, with `telemetry.linger_seconds`; not for training |
| no run without metrics | `telemetry.required: true`; by default a run warns and continues if its port is taken |
| no metrics | `telemetry.enabled: false` |

Certificates, keys and tokens are read once, when a stage starts; a key of another certificate or an empty token is
refused before anything starts. After that, telemetry cannot fail a run: a full disk, a missing Pushgateway or hostile
clients cause at most a warning. The last values of every stage are in `telemetry.json` of the run directory, those of
sharding beside the shard set.

`podscale monitor` and `podscale watch` on the same machine read such an endpoint without options: the run directory
names the certificate to trust and the token's file. Only mTLS needs `--client-certificate` and `--client-key`.

In a cluster, HTTPS with a token needs two Secrets in its namespace and an upgrade (the certificate must have the name
`podscale-metrics`, or the one in `metrics.tls.serverName`; cert-manager's Secrets have the three keys):

```
kubectl create secret generic metrics-tls --from-file=tls.crt --from-file=tls.key --from-file=ca.crt
kubectl create secret generic metrics-token --from-file=token
helm upgrade podscale charts/podscale --reuse-values \\
    --set metrics.tls.secret=metrics-tls --set metrics.tokenSecret=metrics-token
# mTLS: --set metrics.tls.clientSecret=SECRET, with the tls.crt and tls.key of Prometheus
```

PodMonitor or PodMonitoring then configure Prometheus. `podscale-defaults` configures every run submitted from then on,
whose pods mount the Secrets (`launch.cluster.metrics_tls_secret`, `metrics_mutual_tls`, `metrics_token_secret`). Older
runs continue with HTTP and are no longer scraped. `podscale watch` of a job uses the API server as a proxy, which
forwards HTTPS, but neither a token nor a client's certificate; it then shows no values of single ranks.

In a Kubeflow pipeline on a cluster, tasks that run a stage in their own pod (shard, evaluate, and train with `backend:
local`) serve at the same port. KFP cannot declare ports of containers, so the chart has a second monitor for them,
which finds Argo's container `main` by its name and uses port 9464 (PodMonitor by relabelling, PodMonitoring by
number). The label `run` of a shard task is the `run.id` of the compiled document, not the pipeline's parameter
`run_id`: its variables cannot depend on parameters, and its inputs must not, or no run could reuse another's shards. A
task whose result comes from KFP's cache has no pod and serves nothing.
"""

COLUMNS = "| series | type, unit | meaning |\n|---|---|---|"
USE_HEAD = """## Panels and rules

The panels of the [dashboards](../how-to/dashboards.md) and the [rules](../runbooks/README.md) that use each series,
directly or through a recorded one.
"""


@dataclass(frozen=True)
class Rule:
    """Alert or recorded series, and the words of its expression."""

    name: str
    names: frozenset[str]


@dataclass(frozen=True)
class Panel:
    """Panel of a dashboard, and the words of its queries; the board's title is without its common prefix."""

    dashboard: str
    title: str
    names: frozenset[str]


def render() -> str:
    """Return the page."""
    rules, panels = list(read_rules()), list(read_panels())
    parts = [HEAD]
    for exporter, (title, text) in EXPORTERS.items():
        entries = [entry for entry in METRICS if entry.exporter == exporter]
        parts += [f"## {title}\n", f"{text}\n", COLUMNS, *map(row, entries), ""]
    parts += [SERVING, USE_HEAD, *filter(None, (uses(entry, rules, panels) for entry in METRICS)), ""]
    return "\n".join(parts)


def row(entry: MetricSpec) -> str:
    """Return the row of a metric."""
    labels = "; ".join(_label(name, values) for name, values in entry.own_labels.items())
    meaning = f"{entry.meaning} Labels: {labels}." if labels else entry.meaning
    return _join(f"`{entry.series}`", ", ".join(filter(None, (entry.kind, entry.unit))), meaning)


def uses(entry: MetricSpec, rules: list[Rule], panels: list[Panel]) -> str | None:
    """Return the list entry of the panels, by dashboard, and rules that use a metric; None if there are none."""
    mentioned = {entry.series} | {entry.series + suffix for suffix in SUFFIXES.get(entry.kind, ())}
    using: list[Rule] = []
    while recording_rules := [rule for rule in rules if rule.names & mentioned and rule not in using]:
        using += recording_rules
        mentioned |= {rule.name for rule in recording_rules}  # a recorded series also counts as its source
    shown = [panel for panel in panels if panel.names & mentioned]
    if not shown and not using:
        return None
    boards = {panel.dashboard: [one.title for one in shown if one.dashboard == panel.dashboard] for panel in shown}
    lines = [f"- `{entry.series}`"]
    if shown:
        texts = (f"{board} ({', '.join(dict.fromkeys(titles))})" for board, titles in boards.items())
        lines.append(f"    - panels: {'; '.join(texts)}")
    if using:
        lines.append(f"    - rules: {', '.join(f'`{rule.name}`' for rule in using)}")
    return "\n".join(lines)


def _join(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def read_rules(directory: Path = RULES) -> Iterator[Rule]:
    """Yield the rules of the chart, in order."""
    for path in sorted(directory.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                yield Rule(rule.get("alert") or rule["record"], names_in(rule["expr"]))


def read_panels(directory: Path = DASHBOARDS) -> Iterator[Panel]:
    """Yield the panels of the dashboards that have a query, in order."""
    for path in sorted(directory.glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        for panel in _flat(board.get("panels", [])):
            queries = " ".join(target.get("expr", "") for target in panel.get("targets", []))
            if queries:
                yield Panel(board["title"].removeprefix("Podscale / "), panel["title"], names_in(queries))


def names_in(expression: str) -> frozenset[str]:
    """Return all words of an expression, which include the names of its series."""
    return frozenset(WORD.findall(expression))


def _flat(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield panels, and those of collapsed rows."""
    for panel in panels:
        yield panel
        yield from _flat(panel.get("panels", []))


def _label(name: str, values: tuple[str, ...]) -> str:
    return f"`{name}` ({', '.join(values)})" if values else f"`{name}`"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
