"""Python API: the commands as functions that return typed results and raise the project's exceptions."""
