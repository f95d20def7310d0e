"""``dspine-local demo``: see it work, without a model of your own."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspine_local.checks import need_integer
from dspine_local.cli import EXIT_DONE, EXIT_FAILED
from dspine_local.cli.arguments import add_predict_argument, add_threads_argument
from dspine_local.cli.console import OutputConsole
from dspine_local.demo import PROMPTS, DemoRound, demo_engine, run_demo
from dspine_local.progress import progress_bar


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "demo",
        help="answer three prompts with SmolLM2, with and without its drafter",
        description="Answer three prompts with SmolLM2-135M-Instruct, plain and with the drafter that comes along, and "
        "show both side by side: the same text, the acceptance length, tokens per second. Needs the extra 'demo'. "
        "Exit code 1 when an answer differs.",
    )
    add_predict_argument(parser, 128)
    parser.add_argument(
        "--n-draft",
        metavar="K",
        type=int,
        help="tokens drafted per round (default: chosen every round by measurement)",
    )
    add_threads_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when every answer is the same both ways."""
    need_integer("max_tokens", args.max_tokens, 1)
    rounds: list[DemoRound] = []
    console = OutputConsole()
    total = 2 * args.max_tokens * len(PROMPTS)
    with (
        demo_engine(n_draft=args.n_draft, n_threads=args.n_threads) as engine,
        progress_bar("Answering", unit="steps") as progress,
    ):
        n_done = 0

        def advance(n: int) -> None:
            nonlocal n_done
            n_done += n
            progress(n_done, total, "tokens")

        for result in run_demo(engine, args.max_tokens, advance):
            rounds.append(result)
            n_done = 2 * args.max_tokens * len(rounds)
            if not args.json:
                show(console, result)
    same = all(result.same_text for result in rounds)
    if args.json:
        answers = [{**asdict(result), "same_text": result.same_text} for result in rounds]
        print(json.dumps({"same_text": same, "answers": answers}, ensure_ascii=False))
    else:
        console.print(
            "All answers are the same with and without the drafter."
            if same
            else "Answers DIFFER. Plain and batched decoding round differently on this machine: see docs/lossless.md."
        )
        n_rounds = sum(result.drafted.rounds for result in rounds)
        n_drafted = n_rounds - sum(result.drafted.rounds_per_draft_length[0] for result in rounds)
        if args.n_draft is None:
            console.print(
                f"The drafter was asked in {n_drafted} of {n_rounds} rounds: where every token more in a decode costs "
                "much, as on most CPUs, drafts seldom pay. --n-draft 3 asks it in every round. Speeds mean little "
                "while the machine does other work."
            )
    return EXIT_DONE if same else EXIT_FAILED


def show(console: Console, result: DemoRound) -> None:
    """Both answers in two columns."""
    table = Table(title=Text(result.prompt), title_justify="left", show_lines=True, expand=True)
    for title, stats in (("plain", result.plain), ("with drafter", result.drafted)):
        speed = "" if stats.tokens_per_second is None else f", {stats.tokens_per_second:.1f} tokens/s"
        length = "" if not stats.drafted else f", acceptance length {stats.acceptance_length:.2f}"
        table.add_column(Text(f"{title}{speed}{length}"), ratio=1)
    table.add_row(Text(result.plain_text.strip()), Text(result.drafted_text.strip()))
    console.print(table)
