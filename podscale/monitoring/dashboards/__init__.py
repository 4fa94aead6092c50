"""Grafana dashboards as code, one module each; tools/dashboards.py writes their JSON into the chart.

`grafana-foundation-sdk` is a development dependency; users do not need it.
"""

import json

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from podscale.monitoring.dashboards import cluster, compare, data, health, ranks, throughput
from podscale.monitoring.dashboards.frame import build_dashboard

DASHBOARDS = [module.BOARD for module in (throughput, health, ranks, data, cluster, compare)]


def render_dashboards() -> dict[str, str]:
    """Return file name and JSON text of every dashboard; deterministic."""
    return {
        f"{board.uid}.json": json.dumps(build_dashboard(board), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"
        for board in DASHBOARDS
    }
