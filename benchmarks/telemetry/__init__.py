"""Telemetry and checkpoints: their cost in a real training."""
