"""All boards as the text of their files."""

import json

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from podscale.monitoring.dashboards import cluster, compare, data, health, ranks, throughput
from podscale.monitoring.dashboards.frame import build

BOARDS = [module.BOARD for module in (throughput, health, ranks, data, cluster, compare)]


def render() -> dict[str, str]:
    """File name and JSON of every board, the same bytes every time."""
    return {
        f"{board.uid}.json": json.dumps(build(board), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"
        for board in BOARDS
    }
