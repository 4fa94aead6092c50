"""`podscale monitor`: the real Prometheus, with Podscale's rules, for the runs of this machine."""

import time
from contextlib import suppress
from pathlib import Path

from podscale.monitoring.local_prometheus import DEFAULT_INTERVALS, FiringAlert, LocalPrometheus, run_prometheus
from podscale.telemetry.endpoint import ClientCertFiles
from podscale.util.formatting import format_count
from podscale.util.processes import SigtermReceived

POLL_SECONDS = 1.0


def run_monitor(runs: Path, port: int, client: ClientCertFiles | None = None) -> None:
    """Serves until Ctrl-C or SIGTERM, and tells which runs it follows and which alerts fire and end."""
    with suppress(KeyboardInterrupt, SigtermReceived), run_prometheus(runs, port, client) as prometheus:
        print(f"Prometheus at {prometheus.url}, with Podscale's rules; it follows the runs in {runs}", flush=True)
        print(f"its samples stay in {runs}/.prometheus; Ctrl-C ends it", flush=True)
        follow_prometheus(prometheus)


def follow_prometheus(prometheus: LocalPrometheus) -> None:
    """Looks again and again, and prints what is new."""
    followed: list[str] | None = None
    news = AlertPrinter()
    asked = 0.0
    while True:
        prometheus.raise_if_exited()
        found = prometheus.update_targets()
        if found != followed:
            print(
                f"{format_count(len(found), 'endpoint')}: {', '.join(found) or 'no run serves metrics now'}", flush=True
            )
            followed = found
        if time.monotonic() - asked > DEFAULT_INTERVALS.evaluation_seconds:
            asked = time.monotonic()
            with suppress(OSError):
                news.print_changes(set(prometheus.firing_alerts()), prometheus.scrape_errors(), found)
        time.sleep(POLL_SECONDS)


class AlertPrinter:
    """Alerts and failing scrapes, each told once when it begins and once when it is over."""

    def __init__(self) -> None:
        self._firing: set[FiringAlert] = set()
        self._down: dict[str, str] = {}
        self._seen_runs: set[str] = set()

    def print_changes(self, firing: set[FiringAlert], down: dict[str, str], followed: list[str]) -> None:
        """down: why the last scrape of an address failed; told at the second time, for a stage may just have ended."""
        for alert in sorted(firing - self._firing, key=lambda alert: alert.name):
            print(f"ALERT {alert.name}: {alert.summary}", flush=True)
        for alert in sorted(self._firing - firing, key=lambda alert: alert.name):
            print(f"over  {alert.name}: {alert.summary}", flush=True)
        lasting = {address for address in down if address in self._down and address in followed}
        for address in sorted(lasting - self._seen_runs):
            print(f"{address} cannot be scraped: {down[address]}", flush=True)
        self._firing, self._down, self._seen_runs = firing, down, lasting
