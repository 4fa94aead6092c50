"""The findings component."""
