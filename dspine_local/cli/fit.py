"""``dspine-local fit``: what a target and its drafter need of memory, and whether it is there."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dspine_local.cli import EXIT_DONE, EXIT_FAILED
from dspine_local.cli.arguments import add_model_arguments, add_parallel_argument, engine_options

if TYPE_CHECKING:
    from dspine_local.options import EngineOptions
    from dspine_local.planning.fit import Advice
    from dspine_local.planning.measure import PlannedFiles
    from dspine_local.planning.plan import MemoryPlan

_QUANT, _DRAFTER_QUANT = "Q4_K_M", "q8_0"
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "fit",
        help="tell whether a target and its drafter fit into memory",
        description="Show what a target and its drafter would need of each device's memory, from the files' headers "
        "alone; the largest context that fits; and, when it does not fit, what to change. Exit code 0: it fits, 1: it "
        "does not.",
    )
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--vram",
        metavar="SIZE",
        type=parse_size,
        help="memory of each GPU, such as 24GiB, in place of what is free; without a GPU here, of an assumed one",
    )
    group.add_argument("--ram", metavar="SIZE", type=parse_size, help="host memory, in place of what is available")
    group.add_argument("--json", action="store_true", help="print one JSON object (sizes in bytes)")
    group = parser.add_argument_group("models without a file")
    group.add_argument("--model-shape", metavar="NAME", help="qwen3-4b, qwen3-8b or qwen3.8-27b, not -m and -md")
    group.add_argument("--quant", metavar="TYPE", help=f"the target's (default: {_QUANT})")
    group.add_argument("--drafter-quant", metavar="TYPE", help=f"the drafter's, or none (default: {_DRAFTER_QUANT})")
    add_model_arguments(parser, drafter="its drafter, if there is one", need_model=False)
    add_parallel_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; errors are raised."""
    if (args.model is None) == (args.model_shape is None):
        raise ValueError("expected one of --model and --model-shape")
    if args.model_shape is not None and args.model_draft is not None:
        raise ValueError("--model-draft needs --model; a model shape has its own drafter (--drafter-quant)")
    if args.model is not None and (args.quant is not None or args.drafter_quant is not None):
        raise ValueError("--quant and --drafter-quant belong to --model-shape: files have their types")
    options = replace(engine_options(args), n_parallel=args.n_parallel)
    with tempfile.TemporaryDirectory() as folder:
        return _report(args, options, _files(args, Path(folder)))


def _files(args: argparse.Namespace, folder: Path) -> PlannedFiles:
    from dspine_local.files import checked_path
    from dspine_local.planning.measure import PlannedFiles
    from dspine_local.planning.shapes import write_shape

    if args.model_shape is not None:
        drafter = args.drafter_quant or _DRAFTER_QUANT
        return write_shape(args.model_shape, args.quant or _QUANT, None if drafter == "none" else drafter, folder)
    draft = args.model_draft
    return PlannedFiles(str(checked_path(args.model)), None if draft is None else str(checked_path(draft)))


def _report(args: argparse.Namespace, options: EngineOptions, files: PlannedFiles) -> int:
    from dspine_local.loading import longest_draft
    from dspine_local.planning.devices import memory_budgets
    from dspine_local.planning.fit import Planner
    from dspine_local.planning.shapes import SHAPES

    n_draft = 0 if files.drafter is None else longest_draft(files.drafter, options.n_draft)
    planner = Planner(files, memory_budgets(args.vram, args.ram), n_draft)
    largest = planner.largest(options)
    plan = largest if options.n_ctx is None else planner.plan(options, options.n_ctx)
    if plan is None:  # not even the smallest context: show that
        plan = planner.smallest(options)
    advice = [] if plan.fits else planner.advice(options, plan.n_ctx)
    n_largest = max(plan.n_ctx if plan.fits else 0, 0 if largest is None else largest.n_ctx)
    if args.json:
        changes = [vars(entry) for entry in advice]
        print(json.dumps({**plan.to_json(), "largest_n_ctx": n_largest, "advice": changes}))
    else:
        _print(plan, n_largest, advice)
        if args.model_shape is not None:
            assumed = "" if files.drafter is None else "; its drafter's is assumed (docs/memory.md)"
            print(f"Shape: {SHAPES[args.model_shape.lower()].source}{assumed}.")
    return EXIT_DONE if plan.fits else EXIT_FAILED


def _print(plan: MemoryPlan, n_largest: int, advice: list[Advice]) -> None:
    from dspine_local.cli.console import OutputConsole
    from dspine_local.planning.devices import ASSUMED
    from dspine_local.planning.table import advice_table, heading, plan_table

    console = OutputConsole()
    console.print(heading(plan))
    console.print(plan_table(plan))
    if ASSUMED in plan.budgets:
        console.print("This machine has no GPU: compute buffers are those of its CPU.")
    if plan.fits:
        console.print(f"It fits. The largest context that does has {n_largest:,} positions.")
        return
    short = ", ".join(f"{n_bytes / (1 << 20):,.0f} MiB on {device}" for device, n_bytes in plan.missing.items())
    console.print(f"It does not fit: {short} are missing.")
    if advice:
        console.print(advice_table(advice))


def parse_size(text: str) -> int:
    """Bytes of a size such as 24GiB, 512M or 1000000000; K, M, G and T are powers of 1024."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a size such as 24GiB")
    n_bytes = int(float(found[1]) * _UNITS[found[2]])
    if n_bytes < _UNITS["m"]:
        raise argparse.ArgumentTypeError(f"{text!r} is {n_bytes} bytes, expected a size such as 24GiB")
    return n_bytes
