"""Telemetry of a run: Prometheus metrics, the event log, the step log and experiment trackers."""
