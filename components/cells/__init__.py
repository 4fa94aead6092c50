"""The cells component."""
