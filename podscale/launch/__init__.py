"""Start, supervise and restart the worker processes of a stage, without importing a framework."""
