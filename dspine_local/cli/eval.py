"""``dspine-local eval``: how much of a drafter's drafts is accepted."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dspine_local.checks import INT32_MAX, need_integer
from dspine_local.cli.arguments import add_model_arguments, add_predict_argument, engine_options
from dspine_local.cli.console import OutputConsole
from dspine_local.evaluation.measure import EvaluationReport, SetResult, evaluate
from dspine_local.evaluation.plot import check_plot, plot_report
from dspine_local.evaluation.prompts import load_prompts, own_prompts
from dspine_local.progress import progress_bar


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "eval",
        help="measure a drafter's acceptance length",
        description="Answer prompts at temperature 0 and print the acceptance length (emitted tokens per round) of "
        "each category, and how often each position of the draft was accepted. Prompts are JSONL: "
        '{"prompt": ..., "category": ...}, or GSM8K, MATH-500, HumanEval, MBPP, LiveCodeBench, MT-Bench and Arena-Hard '
        "as they are published.",
    )
    parser.add_argument(
        "--prompts", metavar="PATH", type=Path, help="a .jsonl file or a folder of them (default: the project's own 80)"
    )
    parser.add_argument("--limit", metavar="N", type=int, help="prompts per category")
    add_predict_argument(parser, 256)
    parser.add_argument(
        *("-np", "--parallel"),
        dest="n_parallel",
        metavar="N",
        type=int,
        default=1,
        help="answers at once, each with -c positions of its own (default: 1)",
    )
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the result; an older picture is replaced")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(parser, drafter="its drafter", default_length="as many as its block has")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate; errors are raised."""
    from dspine_local.engine import Engine

    if args.model_draft is None:
        raise ValueError("eval needs a drafter: -md DRAFTER.gguf")
    need_integer("max_tokens", args.max_tokens, 1)
    if args.limit is not None:
        need_integer("limit", args.limit, 1)
    options = replace(engine_options(args), n_parallel=args.n_parallel)
    if args.n_ctx is not None:
        need_integer("n_ctx", args.n_ctx, 0, INT32_MAX // args.n_parallel)
        options = replace(options, n_ctx=args.n_ctx * args.n_parallel)
    if args.plot is not None:
        check_plot(args.plot)
    prompts = load_prompts(own_prompts() if args.prompts is None else args.prompts, limit=args.limit)
    engine = Engine(args.model, args.model_draft, options)
    with progress_bar("Answering", unit="steps") as report:
        result = evaluate(engine, prompts, max_tokens=args.max_tokens, report=report)
    if args.plot is not None:
        plot_report(result, args.plot)
    if args.json:
        print(json.dumps(result.to_json()))
    else:
        show(OutputConsole(), result)
    return 0


def show(console: Console, result: EvaluationReport) -> None:
    """The table for people."""
    table = Table(title=f"Acceptance, {result.n_draft} tokens drafted, temperature 0")
    table.add_column("category", no_wrap=True)
    for title in ("prompts", "tokens", "length"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("accepted by position, %")
    for category in result.categories:
        table.add_row(*_cells(category))
    if result.mean is not None:
        table.add_row("mean", "", "", f"{result.mean:.3f}", style="bold")
    console.print(table)
    if result.skipped:
        console.print(f"{result.skipped} prompts did not fit the context: give a larger -c")


def _cells(category: SetResult) -> list[str]:
    length = "" if category.acceptance_length is None else f"{category.acceptance_length:.3f}"
    shares = " ".join(f"{100 * share:.0f}" for share in category.accepted_by_position)
    return [category.category, str(category.n_prompts), str(category.n_tokens), length, shares]
