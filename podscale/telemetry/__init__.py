"""What a run tells: Prometheus metrics, the event log, and the step log for people."""
