"""The collapse component."""
