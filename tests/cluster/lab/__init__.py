"""A real single-node Kubernetes out of processes of this machine, for tests: no Docker, no registry, no downloads of
binaries. See the README beside this package; `python -m tests.cluster.lab --help`."""
