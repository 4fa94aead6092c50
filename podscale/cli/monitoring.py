"""Commands for Prometheus and Grafana: `monitor`, `rules`, `dashboards`."""

import importlib.resources
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli.options import ClientCertificate, ClientKey
from podscale.errors import InputError
from podscale.util.files import write_atomically
from podscale.util.formatting import format_count
from podscale.util.processes import SigtermReceived

if TYPE_CHECKING:
    from podscale.monitoring.local_prometheus import FiringAlert, LocalPrometheus

app = typer.Typer()
rules = typer.Typer(help="Recording rules and alerts for Prometheus.", no_args_is_help=True)
app.add_typer(rules, name="rules")
dashboards = typer.Typer(help="Dashboards for Grafana.", no_args_is_help=True)
app.add_typer(dashboards, name="dashboards")

POLL_SECONDS = 1.0
RULES_FILE = "podscale-rules.yaml"


@app.command()
def monitor(
    runs: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 = any free one.")] = 9090,
    client_certificate: ClientCertificate = None,
    client_key: ClientKey = None,
) -> None:
    """Start Prometheus with Podscale's rules for the runs of this machine, and print the alerts that fire."""
    from podscale.monitoring.local_prometheus import run_prometheus
    from podscale.telemetry.endpoint import ClientCertFiles

    client = ClientCertFiles.from_options(client_certificate, client_key)
    with suppress(KeyboardInterrupt, SigtermReceived), run_prometheus(runs, port, client) as prometheus:
        print(f"Prometheus at {prometheus.url}, with Podscale's rules; it follows the runs in {runs}", flush=True)
        print(f"its samples stay in {runs}/.prometheus; Ctrl-C stops it", flush=True)
        follow_prometheus(prometheus)


@rules.command("export")
def rules_export(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder for podscale-rules.yaml; created if missing.")
    ],
    form: Annotated[
        str, typer.Option("--format", help="prometheus: a rule file; prometheusrule: for its operator; gmp: Google's.")
    ] = "prometheus",
    runbooks: Annotated[
        str, typer.Option(metavar="URL", help="Address of docs/runbooks/, for the links.")
    ] = "docs/runbooks/",
    thresholds: Annotated[
        list[str], typer.Option("--threshold", metavar="NAME=NUMBER", help="Threshold of an alert (docs/runbooks).")
    ] = [],
    without: Annotated[list[str], typer.Option(metavar="ALERT", help="Leave out an alert.")] = [],
    shorten: Annotated[
        float, typer.Option(metavar="TIMES", help="Divide every window and wait by this number, for a drill.")
    ] = 1,
) -> None:
    """Write the rules for a Prometheus that the chart does not configure."""
    from podscale.kubernetes.render.common import to_yaml
    from podscale.monitoring.rule_files import FORMATS, RuleSettings

    if form not in FORMATS:
        raise InputError("unknown format", field="--format", got=form, hint=f"Choose one of {', '.join(FORMATS)}.")
    settings = RuleSettings(
        thresholds=dict(map(_parse_threshold, thresholds)),
        runbooks=runbooks,
        excluded_alerts=frozenset(without),
        shorten=shorten,
    )
    text = to_yaml([FORMATS[form](settings)])
    path = directory / RULES_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", field=str(path)) from error
    print(path)


@dashboards.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the dashboards; created if missing.")],
    runbooks: Annotated[
        str, typer.Option(metavar="URL", help="Address of docs/runbooks/, for the links.")
    ] = "docs/runbooks/",
) -> None:
    """Write the dashboards as files for Grafana's provisioning or import page."""
    from podscale.monitoring.rule_types import fill_tokens

    if set(runbooks) & set(' "\\'):
        problem = "a URL has no spaces, quotes or backslashes"
        raise InputError(problem, field="--runbooks", got=runbooks)
    packaged = importlib.resources.files("podscale.dashboards")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(packaged.iterdir(), key=lambda file: file.name):
            if file.name.endswith(".json"):
                text = fill_tokens(file.read_text(encoding="utf-8"), {"runbooks": f"{runbooks.rstrip('/')}/"})
                write_atomically(folder / file.name, text)
                print(folder / file.name)
    except OSError as error:
        problem = f"cannot write the dashboards: {error.strerror or error}"
        raise InputError(problem, field=str(folder)) from error


def follow_prometheus(prometheus: "LocalPrometheus") -> None:
    """Poll the local Prometheus, and print new targets, alerts and failing scrapes."""
    from podscale.monitoring.local_prometheus import DEFAULT_INTERVALS

    targets: list[str] | None = None
    printer = AlertPrinter()
    last_alerts = 0.0
    while True:
        prometheus.raise_if_exited()
        previous, targets = targets, prometheus.update_targets()
        if targets != previous:
            addresses = ", ".join(targets) or "no run serves metrics now"
            print(f"{format_count(len(targets), 'endpoint')}: {addresses}", flush=True)
        if time.monotonic() - last_alerts > DEFAULT_INTERVALS.evaluation_seconds:
            last_alerts = time.monotonic()
            with suppress(OSError):
                printer.print_changes(set(prometheus.firing_alerts()), prometheus.scrape_errors(), targets)
        time.sleep(POLL_SECONDS)


class AlertPrinter:
    """Printer of new and resolved alerts, and of failing scrapes."""

    def __init__(self) -> None:
        self._firing: set[FiringAlert] = set()
        self._down: dict[str, str] = {}
        self._printed_errors: set[str] = set()

    def print_changes(self, firing: "set[FiringAlert]", down: dict[str, str], targets: list[str]) -> None:
        """Print new and resolved alerts, and new scrape errors.

        `down` has the error of each address that cannot be scraped. An error is printed the second time in a
        row, because a stage may just have ended.
        """
        for alert in sorted(firing - self._firing, key=lambda alert: alert.name):
            print(f"ALERT {alert.name}: {alert.summary}", flush=True)
        for alert in sorted(self._firing - firing, key=lambda alert: alert.name):
            print(f"over  {alert.name}: {alert.summary}", flush=True)
        lasting = {address for address in down if address in self._down and address in targets}
        for address in sorted(lasting - self._printed_errors):
            print(f"{address} cannot be scraped: {down[address]}", flush=True)
        self._firing, self._down, self._printed_errors = firing, down, lasting


def _parse_threshold(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not equals or not math.isfinite(number) or number < 0:
        problem = "not NAME=NUMBER with a number of 0 or more, such as dataWaitShare=0.3"
        raise InputError(problem, field="--threshold", got=text)
    return name, number
