"""``dspine-local doctor``: what this installation can do on this machine, and what stands in the way."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from dspine_local.cli import EXIT_DONE, EXIT_FAILED
from dspine_local.cli.arguments import add_model_arguments, engine_options

if TYPE_CHECKING:
    from dspine_local.planning.measure import PlannedFiles


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="list devices, and check that they can run a drafter",
        description="Show versions, this machine's devices, which operations of the drafter's graphs each can run, and "
        "the parts that the target's graph is cut into. Without -m and -md: for a published drafter's shape. Files are "
        "read as far as their headers, nothing is computed. Exit code 0: no problem, 1: problems, with what helps.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(parser, drafter="a drafter", need_model=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine and print; errors are raised."""
    from dspine_local.doctor import examine, problems

    diagnosis = examine(_files(args), engine_options(args))
    found = problems(diagnosis)
    code = EXIT_FAILED if found else EXIT_DONE
    if args.json:
        print(json.dumps({**diagnosis.to_json(), "problems": [asdict(problem) for problem in found]}))
        return code
    from dspine_local.cli.console import OutputConsole
    from dspine_local.doctor.report import device_table, graph_lines, operation_table, summary

    console = OutputConsole()
    print(summary(diagnosis))
    console.print(device_table(diagnosis))
    console.print(operation_table(diagnosis))
    for line in graph_lines(diagnosis.graphs):
        print(line)
    for problem in found:
        print(f"Problem: {problem.found}.\n  What helps: {problem.remedy}")
    if not found:
        print("No problems.")
    return code


def _files(args: argparse.Namespace) -> PlannedFiles | None:
    from dspine_local.files import checked_path
    from dspine_local.planning.measure import PlannedFiles

    if (args.model is None) != (args.model_draft is None):
        raise ValueError("expected both --model and --model-draft, or neither")
    if args.model is None:
        return None
    return PlannedFiles(str(checked_path(args.model)), str(checked_path(args.model_draft)))
