"""What is made of our metrics: recording rules and alerts, and dashboards, each the one source of its renderings."""
