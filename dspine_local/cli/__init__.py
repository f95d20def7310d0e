"""The ``dspine-local`` command: one module per subcommand, errors and exit codes here."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
# As a shell reports a program that SIGINT or SIGPIPE has ended.
EXIT_INTERRUPTED, EXIT_NO_READER = 130, 141

# Nothing is wrong with the input when a disk is full or broken.
SYSTEM_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE)

COMMANDS = (
    *("convert", "inspect", "fit", "quantize", "quantize-sweep", "generate", "chat", "serve", "parity", "demo"),
    *("train", "eval", "bench", "audit", "doctor", "rpc-server"),
)


def load_commands() -> None:
    """Import every command and what they need."""
    import_module("dspine_local._native")
    for name in COMMANDS:
        _module(name)


def _module(command: str) -> ModuleType:
    return import_module(f"dspine_local.cli.{command.replace('-', '_')}")


class HelpFormatter(argparse.HelpFormatter):
    """Names every default that an option's own text does not."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if text is None or "default" in text or not action.option_strings:
            return text
        if default in (None, "", [], (), argparse.SUPPRESS) or default is False:
            return text
        return f"{text} (default: {'on' if default is True else '%(default)s'})"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, instead of behind a page of usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **settings})

    def error(self, message: str) -> NoReturn:
        """Exit; ``--help`` has the rest."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; each sets ``run``."""
    from dspine_local import __version__
    from dspine_local.cli.arguments import option_flags

    parser = Parser(
        prog="dspine-local",
        description="Speculative decoding with DSpine block drafters for GGUF models: the target's own answers, in "
        "fewer decodes.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted, 141 the reader of the output "
        "has left, as `| head` does.",
    )
    parser.add_argument("--version", action="version", version=f"dspine-local {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and llama.cpp's log")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        _module(name).add_parser(subparsers)
    for subparser in subparsers.choices.values():
        subparser.set_defaults(flags=option_flags(subparser))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code.

    Wrong input ends with one line on stderr that says what was found and expected, and never with a traceback.
    """
    from dspine_local import _native
    from dspine_local.checks import OptionError, shown
    from dspine_local.errors import BackendError, DSpineError

    args = argparse.Namespace(debug=False, flags={})
    try:
        try:
            args = build_parser().parse_args(argv)
            if args.debug:
                logging.basicConfig(level=logging.INFO, format="%(message)s")
                _native.set_log_verbose(True)
            return int(args.run(args))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a reader that has left is understood
    except KeyboardInterrupt:
        complain("\ninterrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NO_READER
    except OptionError as error:
        name = args.flags.get(error.name)
        complain(
            f"dspine-local: {error if name is None else f'{name} {shown(error.value)}, expected {error.expected}'}"
        )
        return EXIT_USAGE
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        failed = isinstance(error, BackendError) or (isinstance(error, OSError) and error.errno in SYSTEM_ERRORS)
        expected = isinstance(error, DSpineError | ValueError | OSError)
        text = one_line(describe(error)) if expected else f"internal error: {error!r}; --debug shows where"
        complain(f"dspine-local: {text}")
        return EXIT_USAGE if expected and not failed else EXIT_FAILED


def describe(error: Exception) -> str:
    """An error's message; the operating system's without its number."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: '{os.fsdecode(error.filename)}'"
    return str(error)


def one_line(text: str) -> str:
    """With control characters, which file names may have, as escapes; lines of a table stay."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def complain(text: str) -> None:
    """One line on stderr, if anybody is there to read it."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
