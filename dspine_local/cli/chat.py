"""``dspine-local chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from dspine_local.cli import EXIT_DONE
from dspine_local.cli.arguments import (
    add_model_arguments,
    add_predict_argument,
    add_sampling_arguments,
    engine_options,
    sampling_options,
)
from dspine_local.options import GenerationOptions

if TYPE_CHECKING:
    from dspine_local.chat.session import ChatSession


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a target, with its drafter if given. Enter sends, Esc Enter begins a new line, Ctrl-C "
        "stops the answer; /help lists the commands.",
    )
    parser.add_argument("-sys", "--system-prompt", metavar="TEXT", help="system message")
    add_predict_argument(parser, -1)
    parser.add_argument("--history", metavar="FILE", type=Path, default=_default_history(), help="what was typed")
    add_model_arguments(parser, strict=True)
    add_sampling_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until the user leaves; errors of the start are raised."""
    from dspine_local.chat.session import ChatSession
    from dspine_local.engine import Engine

    engine = Engine(args.model, args.model_draft, engine_options(args))
    options = GenerationOptions(max_tokens=args.max_tokens, sampling=sampling_options(args))
    session = ChatSession(engine, options, args.system_prompt)
    print(f"{Path(args.model).name}, {engine.drafting}. /help lists the commands.", file=sys.stderr)
    read = _terminal_reader(session, args.history) if sys.stdin.isatty() else _plain_reader()
    while True:
        try:
            line = read()
            if line is None or (line.strip() and not _handle(session, line)):
                return EXIT_DONE
        except KeyboardInterrupt:  # no answer to stop: the line is given up
            continue


def _handle(session: ChatSession, line: str) -> bool:
    """Answer or obey; False to leave. A mistake is told, and the conversation goes on."""
    from dspine_local.errors import DSpineError

    try:
        if line.startswith("/"):
            told = session.command(line.strip())
            if told is not None:
                print(told)
            return told is not None
        _print_answer(session, line)
    except (ValueError, DSpineError, OSError) as error:
        print(f"dspine-local: {error}", file=sys.stderr)
    return True


def _print_answer(session: ChatSession, text: str) -> None:
    from dspine_local.cli.console import OutputConsole

    console = OutputConsole(soft_wrap=True)
    answer = session.answer(text)
    try:
        with closing(answer):
            for delta in answer:
                style = "dim italic" if delta.kind == "reasoning" else None
                console.print(delta.text, end="", markup=False, style=style)
    except KeyboardInterrupt:  # also one that comes while the answer is closed
        console.print(" [stopped]", end="", markup=False, style="dim")
    console.print()
    if not sys.stdin.isatty():
        print(f"[{session.status()}]", file=sys.stderr)


def _terminal_reader(session: ChatSession, history: Path) -> Callable[[], str | None]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history.parent.mkdir(parents=True, exist_ok=True)
    prompt: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)),
        key_bindings=keys,
        multiline=True,
        bottom_toolbar=session.status,
        prompt_continuation="  ",
    )

    def read() -> str | None:
        try:
            return prompt.prompt("> ")
        except EOFError:
            return None

    return read


def _plain_reader() -> Callable[[], str | None]:
    """Lines of a pipe."""

    def read() -> str | None:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    return read


def _default_history() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "dspine-local" / "history"
