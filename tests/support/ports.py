"""Ports for servers of tests."""

import random
import socket

OURS = range(10_000, 32_000)
"""Below those of outgoing connections, one of which may take a free port before its server does."""

_chance = random.Random()  # of the system's entropy: each process of pytest draws its own


def free_port() -> int:
    """One that nobody listens on."""
    while True:
        port = _chance.choice(OURS)
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
