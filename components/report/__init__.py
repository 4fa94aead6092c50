"""The report component."""
