"""The command line: a module for the commands of each subject, which import what they need when they run, so that
`--help` answers at once."""

from podscale.cli.app import UsageError, app, main

__all__ = ["UsageError", "app", "main"]
