"""Rules, alerts and dashboards over the series of the catalogue."""
