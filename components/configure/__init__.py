"""The configure component."""
