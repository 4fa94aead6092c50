"""Start, supervise and restart the worker processes of a stage. Imports no framework."""
