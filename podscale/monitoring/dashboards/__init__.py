"""Grafana dashboards as code; tools/dashboards.py writes their JSON into the chart, and users need nothing of this.

One module a board. `grafana-foundation-sdk` is a dependency of development alone.

All boards as the text of their files.
"""

import json

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from podscale.monitoring.dashboards import cluster, compare, data, health, ranks, throughput
from podscale.monitoring.dashboards.frame import build_dashboard

DASHBOARDS = [module.BOARD for module in (throughput, health, ranks, data, cluster, compare)]


def render_dashboards() -> dict[str, str]:
    """File name and JSON of every board, the same bytes every time."""
    return {
        f"{board.uid}.json": json.dumps(build_dashboard(board), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"
        for board in DASHBOARDS
    }
