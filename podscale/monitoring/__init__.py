"""What Prometheus makes of our metrics: recording rules and alerts, the one source of all their renderings."""
