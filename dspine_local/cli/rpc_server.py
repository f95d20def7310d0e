"""``dspine-local rpc-server``: lends this machine's devices to another's target (llama.cpp's RPC backend)."""

from __future__ import annotations

import argparse
import sys
import threading

from dspine_local.cli.arguments import add_threads_argument
from dspine_local.cli.listen import listen
from dspine_local.errors import BackendError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "rpc-server",
        help="lend this machine's devices to another one's target",
        description="Compute for a dspine-local or llama.cpp of the same version on another machine (there: --rpc "
        "HOST:PORT), until interrupted. Needs a llama-cpp-python compiled with -DGGML_RPC=ON. The protocol has no "
        "authentication and no encryption: only for networks where everyone is trusted.",
    )
    parser.add_argument("-H", "--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("-p", "--port", type=int, default=50052, help="default: %(default)s")
    parser.add_argument(
        *("-d", "--device"),
        metavar="NAMES",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        help="devices to lend, separated by commas (default: all GPUs, or the CPU where there is none)",
    )
    add_threads_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; errors are raised."""
    from dspine_local import _native

    gpus = [name for name, _, computes, _, _ in _native.devices() if computes]
    devices = args.device or gpus or ["CPU"]
    with listen(args.host, args.port) as listener:  # an error here, where ggml would only print one
        port = listener.getsockname()[1]
    if args.host not in ("127.0.0.1", "localhost"):
        print(f"warning: anyone who reaches {args.host} can use, and crash, this machine's devices", file=sys.stderr)
    failures: list[Exception] = []

    def serve() -> None:
        try:
            _native.serve_rpc(f"{args.host}:{port}", devices, args.n_threads)
        except Exception as error:  # raised below, in the thread that reports
            failures.append(error)

    # Not in the main thread: ggml waits for clients without noticing Ctrl-C.
    server = threading.Thread(target=serve, daemon=True)
    server.start()
    while server.is_alive():
        server.join(timeout=1.0)
    raise failures[0] if failures else BackendError(f"ggml could not serve at {args.host}:{port}")
