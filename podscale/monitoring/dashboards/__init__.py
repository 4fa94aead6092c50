"""Grafana dashboards as code, one module each; tools/dashboards.py writes their JSON into the chart.

Only development needs `grafana-foundation-sdk`.
"""

import json

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from podscale.monitoring.dashboards import cluster, compare, data, health, ranks, throughput
from podscale.monitoring.dashboards.frame import build_dashboard

DASHBOARDS = [module.BOARD for module in (throughput, health, ranks, data, cluster, compare)]


def render_dashboards() -> dict[str, str]:
    """Return the JSON text of every dashboard by file name."""
    return {
        f"{board.uid}.json": json.dumps(build_dashboard(board), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"
        for board in DASHBOARDS
    }
