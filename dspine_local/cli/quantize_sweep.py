"""``dspine-local quantize-sweep``: which type to keep a drafter in."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from dspine_local.cli import EXIT_DONE
from dspine_local.cli.arguments import add_model_arguments, add_predict_argument, engine_options
from dspine_local.progress import progress_bar
from dspine_local.sweep.run import TYPES


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "quantize-sweep",
        help="try a drafter in several types, and recommend one",
        description="Quantize a drafter to several types, answer prompts with each at temperature 0, and compare file "
        "sizes, draft times and acceptance lengths. The drafters and the figures stay in a folder; a sweep that was "
        "interrupted goes on when the same command is given again.",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder for the drafters and figures")
    parser.add_argument("--types", metavar="TYPE,...", default=",".join(TYPES), help="default: %(default)s")
    parser.add_argument("--prompts", metavar="PATH", type=Path, help="JSONL (default: the project's own)")
    parser.add_argument("--limit", metavar="N", type=int, help="prompts per category, at least 2 (default: all)")
    add_predict_argument(parser, 128)
    parser.add_argument(
        "--allow-requantize", action="store_true", help="take a quantized drafter: each time costs quality"
    )
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the result; an older picture is replaced")
    parser.add_argument("--force", action="store_true", help="start anew, and replace files of these names in DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(parser, drafter="the drafter to quantize", default_length="as many as its block has")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Sweep and recommend; errors are raised."""
    from dspine_local.checks import need_integer
    from dspine_local.evaluation.plot import check_plot
    from dspine_local.evaluation.prompts import load_prompts, own_prompts
    from dspine_local.sweep import compare, recommend, sweep_types

    if args.model_draft is None:
        raise ValueError("quantize-sweep needs a drafter: -md DRAFTER.gguf")
    need_integer("max_tokens", args.max_tokens, 2)
    if args.limit is not None:
        need_integer("limit", args.limit, 2)
    if args.plot is not None:
        check_plot(args.plot)
    prompts = load_prompts(own_prompts() if args.prompts is None else args.prompts, limit=args.limit)
    with progress_bar("Sweeping", unit="steps") as report:
        sweep = sweep_types(
            *(args.model, args.model_draft, args.out, prompts),
            types=args.types.split(","),
            options=engine_options(args),
            max_tokens=args.max_tokens,
            allow_requantize=args.allow_requantize,
            overwrite=args.force,
            report=report,
        )
    compared = compare(sweep.results)
    chosen = recommend(compared)
    from dspine_local.cli.console import OutputConsole
    from dspine_local.sweep.report import advice, plot_sweep, sweep_table

    if args.plot is not None:
        plot_sweep(compared, chosen, args.plot)
    if args.json:
        types = [
            {
                **{name: value for name, value in asdict(c).items() if name != "result"},
                **{name: getattr(c.result, name) for name in ("type", "file", "n_bytes", "types", "length")},
                **{name: getattr(c.result, name) for name in ("draft_s", "draft_share")},
            }
            for c in compared
        ]
        print(json.dumps({"about": sweep.about, "types": types, "recommended": chosen.result.type}))
        return EXIT_DONE
    OutputConsole().print(sweep_table(compared))
    print(advice(chosen, compared))
    return EXIT_DONE
