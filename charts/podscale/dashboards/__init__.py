"""The dashboards' JSON, made by tools/dashboards.py; packaged as podscale.dashboards, for those without Helm."""
