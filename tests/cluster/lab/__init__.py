"""Real single-node Kubernetes as processes on this machine, for tests, without Docker, registry or binary downloads.

See ../README.md and `python -m tests.cluster.lab --help`.
"""
