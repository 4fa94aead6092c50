"""Command line. The modules import heavy packages inside the commands, so that `--help` is fast."""

from podscale.cli.app import UsageError, app, main

__all__ = ["UsageError", "app", "main"]
