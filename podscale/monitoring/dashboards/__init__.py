"""Grafana dashboards as code; tools/dashboards.py writes their JSON into the chart, and users need nothing of this.

One module a board. `grafana-foundation-sdk` is a dependency of development alone.
"""
