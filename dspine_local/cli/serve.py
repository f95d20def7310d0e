"""``dspine-local serve``: llama-server's and OpenAI's endpoints, and a chat page."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dspine_local.checks import decode_utf8
from dspine_local.cli import EXIT_DONE, EXIT_FAILED
from dspine_local.cli.arguments import (
    add_model_arguments,
    add_parallel_argument,
    add_predict_argument,
    add_sampling_arguments,
    engine_options,
    sampling_options,
)
from dspine_local.cli.listen import listen
from dspine_local.options import EngineOptions

if TYPE_CHECKING:
    from dspine_local.server.config import ServerOptions

logger = logging.getLogger("dspine_local.server")

_GRACE_S = 3


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "serve",
        help="answer llama-server's and OpenAI's clients over HTTP",
        description="Serve a target and, if given, its drafter over HTTP: llama-server's and OpenAI's endpoints, and a "
        "chat page at /. Ends with Ctrl-C.",
    )
    add_model_arguments(parser, strict=True)
    group = parser.add_argument_group("server")
    group.add_argument("--host", metavar="HOST", default="127.0.0.1", help="default: %(default)s, this machine only")
    group.add_argument(
        "--port", metavar="PORT", type=int, default=8080, help="default: %(default)s; 0 takes a free one"
    )
    add_parallel_argument(group)
    group.add_argument(
        "--checkpoint-mib",
        metavar="MIB",
        type=int,
        default=EngineOptions().checkpoint_mib,
        help="memory for states that a recurrent or hybrid target can go back to, for prompts that begin like earlier "
        "ones; all slots together, 0 is none",
    )
    group.add_argument("--api-key", metavar="KEY", action="append", default=[], help="ask for it; may be repeated")
    group.add_argument("--api-key-file", metavar="FILE", type=Path, help="file with one key per line")
    group.add_argument(
        "-a", "--alias", metavar="NAMES", default="", help="names of the model, separated by commas; * allows any"
    )
    group.add_argument("--slot-save-path", metavar="DIR", type=Path, help="folder for saved slots")
    group.add_argument("--slots", action=argparse.BooleanOptionalAction, default=True, help="answer /slots")
    group.add_argument("--metrics", action=argparse.BooleanOptionalAction, default=True, help="answer /metrics")
    group.add_argument(
        "--max-body", metavar="MIB", type=int, default=8, help="refuse longer requests (default: %(default)s MiB)"
    )
    group.add_argument(
        "--sse-ping-interval", metavar="S", type=int, default=30, help="comment after S silent seconds; -1 never"
    )
    add_predict_argument(group, -1, "tokens at most")
    add_sampling_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; errors are raised."""
    import uvicorn

    from dspine_local.engine import Engine
    from dspine_local.server.app import create_app

    for path in (args.model, args.model_draft):
        if path is not None and not Path(path).is_file():
            raise FileNotFoundError(f"no such file: '{path}'")
    options = _server_options(args)
    models = replace(engine_options(args), n_parallel=args.n_parallel, checkpoint_mib=args.checkpoint_mib)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    app = create_app(lambda: Engine(args.model, args.model_draft, models), options)
    with listen(args.host, args.port) as listener:
        host, port = listener.getsockname()[:2]
        logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        if not options.loopback and not options.api_keys:
            logger.warning("anyone who reaches %s can use this server: give an --api-key", host)
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S
        )

        class Server(uvicorn.Server):
            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                # Answers end first: uvicorn would wait for them.
                has_ended = await asyncio.to_thread(app.state.server.close)
                await super().shutdown(sockets)
                if not has_ended:  # a long decode, or a grammar that takes for ever: Python would wait for it
                    logger.warning("a round did not end in time: leaving in the middle of it")
                    sys.stderr.flush()
                    os._exit(EXIT_FAILED)

        server = Server(config)
        app.state.server.when_failed = lambda: setattr(server, "should_exit", True)
        server.run(sockets=[listener])
    if app.state.server.error is not None:
        raise app.state.server.error
    return EXIT_DONE


def _server_options(args: argparse.Namespace) -> ServerOptions:
    from dspine_local.server.config import ServerOptions

    keys = list(args.api_key)
    if args.api_key_file is not None:
        text = decode_utf8(f"'{args.api_key_file}'", args.api_key_file.read_bytes())
        keys += [line.strip() for line in text.splitlines() if line.strip()]
    return ServerOptions(
        model_path=args.model,
        drafter_path=args.model_draft,
        aliases=tuple(name.strip() for name in args.alias.split(",") if name.strip()),
        api_keys=tuple(keys),
        slot_save_path=args.slot_save_path,
        loopback=_is_loopback(args.host),
        endpoint_slots=args.slots,
        endpoint_metrics=args.metrics,
        max_body_bytes=args.max_body << 20,
        ping_interval_s=args.sse_ping_interval,
        n_predict=args.max_tokens,
        sampling=sampling_options(args),
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
