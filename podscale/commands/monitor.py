"""`podscale monitor`: the real Prometheus, with Podscale's rules, for the runs of this machine."""

import time
from contextlib import suppress
from pathlib import Path

from podscale.monitoring.local import Firing, LocalPrometheus, running
from podscale.monitoring.scraping import CADENCE
from podscale.stopping import Stopped
from podscale.telemetry.endpoint import Client
from podscale.text import count

LOOK_SECONDS = 1.0


def monitor(runs: Path, port: int, client: Client | None = None) -> None:
    """Serves until Ctrl-C or SIGTERM, and tells which runs it follows and which alerts fire and end."""
    with suppress(KeyboardInterrupt, Stopped), running(runs, port, client) as prometheus:
        print(f"Prometheus at {prometheus.url}, with Podscale's rules; it follows the runs in {runs}", flush=True)
        print(f"its samples stay in {runs}/.prometheus; Ctrl-C ends it", flush=True)
        follow(prometheus)


def follow(prometheus: LocalPrometheus) -> None:
    """Looks again and again, and prints what is new."""
    followed: list[str] | None = None
    news = News()
    asked = 0.0
    while True:
        prometheus.check()
        found = prometheus.follow()
        if found != followed:
            print(f"{count(len(found), 'endpoint')}: {', '.join(found) or 'no run serves metrics now'}", flush=True)
            followed = found
        if time.monotonic() - asked > CADENCE.evaluation:
            asked = time.monotonic()
            with suppress(OSError):
                news.tell(set(prometheus.alerts()), prometheus.troubles(), found)
        time.sleep(LOOK_SECONDS)


class News:
    """Alerts and failing scrapes, each told once when it begins and once when it is over."""

    def __init__(self) -> None:
        self._firing: set[Firing] = set()
        self._down: dict[str, str] = {}
        self._told: set[str] = set()

    def tell(self, firing: set[Firing], down: dict[str, str], followed: list[str]) -> None:
        """down: why the last scrape of an address failed; told at the second time, for a stage may just have ended."""
        for alert in sorted(firing - self._firing, key=lambda alert: alert.name):
            print(f"ALERT {alert.name}: {alert.summary}", flush=True)
        for alert in sorted(self._firing - firing, key=lambda alert: alert.name):
            print(f"over  {alert.name}: {alert.summary}", flush=True)
        lasting = {address for address in down if address in self._down and address in followed}
        for address in sorted(lasting - self._told):
            print(f"{address} cannot be scraped: {down[address]}", flush=True)
        self._firing, self._down, self._told = firing, down, lasting
