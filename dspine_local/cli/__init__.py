"""The ``dspine-local`` command: one module per subcommand, errors and exit codes here."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

COMMANDS = ("convert", "inspect", "parity", "generate", "chat", "serve", "demo", "train", "eval")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; each sets ``run``."""
    from dspine_local import __version__

    parser = argparse.ArgumentParser(
        prog="dspine-local",
        description="Speculative decoding with DSpine block drafters for GGUF models: the target's own answers, in "
        "fewer decodes.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"dspine-local {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and llama.cpp's log")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"dspine_local.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code.

    Wrong input ends with one line on stderr that says what was found and expected, and never with a traceback.
    """
    from dspine_local import _native
    from dspine_local.errors import BackendError, DSpineError

    args = build_parser().parse_args(argv)
    if args.debug:
        _native.set_log_verbose(True)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        wrong_input = isinstance(error, DSpineError | ValueError | OSError) and not isinstance(error, BackendError)
        expected = wrong_input or isinstance(error, BackendError)
        message = str(error) if expected else f"internal error: {error!r}; --debug shows where"
        print(f"dspine-local: {message}", file=sys.stderr)
        return EXIT_USAGE if wrong_input else EXIT_FAILED
