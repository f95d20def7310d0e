"""A listening socket for a command that serves."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that a port that is taken shows before models are loaded.

    Raises:
        ValueError: It is taken, or no port, or the host is unknown.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port = {port}, expected 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ValueError(f"host '{host}' is unknown: {error.strerror}") from error
    try:
        return socket.create_server((str(address[0]), port), family=family, backlog=128)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from error
