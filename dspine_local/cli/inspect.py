"""``dspine-local inspect``: what a GGUF file holds."""

from __future__ import annotations

import argparse
import json

from dspine_local.summary import summarize


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what a drafter or target GGUF holds",
        description="Show architecture, sizes and tensor types of a GGUF file and, for drafters, the tapped target "
        "layers. Only the header is read.",
    )
    parser.add_argument("file", metavar="FILE.gguf", help="drafter or target")
    parser.add_argument("--json", action="store_true", help="print one JSON object (sizes in bytes)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the summary; errors are raised."""
    summary = summarize(args.file)
    print(json.dumps(summary.to_json()) if args.json else summary.to_text())
    return 0
