"""Monitoring of runs: recording rules, alerts, dashboards, a local Prometheus, and `podscale watch`."""
