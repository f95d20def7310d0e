"""Devices of other machines: llama.cpp's RPC servers, asked in a child process before ggml meets them.

ggml ends the process when a server does not answer, or answers something else.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

from dspine_local import _native
from dspine_local.errors import BackendError

ANSWER_S = 30.0
_REFUSED = 3
_PROBE = f"""
import sys
from dspine_local import _native
try:
    _native.add_rpc_server(sys.argv[1])
except _native.BackendError as error:
    print(error)
    sys.exit({_REFUSED})
"""


def connect(servers: Sequence[str]) -> None:
    """Make the servers' devices known to this process. Their names are RPC0, RPC1, ...

    Args:
        servers: Each as ``host:port``.
    Raises:
        ValueError: No host or port.
        BackendError: No server answers there, or this build of llama.cpp has no RPC backend.
    """
    for server in servers:
        port = re.fullmatch(r".+:(\d{1,5})", server)
        if port is None or not 1 <= int(port[1]) <= 65535:
            raise ValueError(f"the RPC server '{server}' is not HOST:PORT, such as 192.0.2.7:50052")
    for server in servers:
        _probe(server)
        _native.add_rpc_server(server)


def _probe(server: str) -> None:
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _PROBE, server], capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BackendError(f"the RPC server '{server}' did not answer within {ANSWER_S:.0f} s") from None
    if asked.returncode == _REFUSED:
        raise BackendError(asked.stdout.strip())
    if asked.returncode != 0:
        raise BackendError(
            f"no RPC server answers at '{server}', expected llama.cpp's rpc-server of the same version there"
        )
