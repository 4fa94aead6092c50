"""Ports for servers of tests."""

import random
import socket

OURS = range(10_000, 32_000)
"""Ports below those of outgoing connections, which could take a free port before its server does."""

_chance = random.Random()  # seeded by the system, so that each pytest process draws other ports


def free_port() -> int:
    """Return a port on which no process listens."""
    while True:
        port = _chance.choice(OURS)
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
