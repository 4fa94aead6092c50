"""The summary component (exit handler)."""
