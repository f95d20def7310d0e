"""``dspine-local parity``: does our drafter compute what another implementation recorded?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from dspine_local.cli import EXIT_DONE, EXIT_FAILED
from dspine_local.parity import CPU, MAX_DEVICE_ERROR, MAX_ERROR, CaseParity, run_case


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "parity",
        help="compare the drafter with recorded outputs",
        description="Convert and load the drafter of each case, draft its block, and print every array's relative "
        f"error ||a-b||/||b|| against the recorded one. Passes when all are at most {MAX_ERROR:g} "
        f"({MAX_DEVICE_ERROR:g} beside the CPU) and the tokens are identical; exit code 0, otherwise 1. "
        "docs/parity.md describes the format.",
    )
    parser.add_argument("cases", metavar="CASE_DIR", nargs="+", help="folder with drafter/ and case.npz")
    parser.add_argument("--outtype", default="f32", help="type of the converted weights")
    parser.add_argument("-dev", "--device", metavar="NAME", default=CPU, help="the drafter's")
    parser.add_argument("--json", action="store_true", help="print one JSON object per case")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare; 0 when all cases pass."""
    results = []
    for case in args.cases:
        result = run_case(case, outtype=args.outtype, device=args.device)
        results.append(result)
        print(json.dumps({**asdict(result), "passed": result.passed}) if args.json else report_text(result))
    return EXIT_DONE if all(result.passed for result in results) else EXIT_FAILED


def report_text(result: CaseParity) -> str:
    """One case for people."""
    lines = [f"{result.case}: {'passed' if result.passed else 'FAILED'}"]
    for array in result.arrays:
        shape = "x".join(map(str, array.shape))
        lines.append(f"  {array.name:<16} {shape:<14} {array.error:.1e}{'' if array.passed else '  FAILED'}")
    choices = (
        ("candidates", result.candidates),
        ("selected", result.selected),
        ("selected (path)", result.path_selected),
    )
    words = {True: "identical", False: "DIFFERENT  FAILED", None: "not recorded"}
    lines.extend(f"  {name:<16} {words[same]}" for name, same in choices)
    return "\n".join(lines)
