"""``dspine-local quantize``: drafters and targets in smaller types."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dspine_local.cli.arguments import add_threads_argument
from dspine_local.cli.convert import fallback_lines
from dspine_local.progress import progress_bar

if TYPE_CHECKING:
    from dspine_local.quantize.report import QuantizationReport

MIB = 1 << 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "quantize",
        help="rewrite a drafter or target in a smaller type",
        description="Rewrite a drafter (by our quantizer, any type to any) or a target (by llama.cpp's own) in another "
        "type, such as q8_0 or Q4_K_M. The file appears whole or not at all.",
    )
    parser.add_argument("source", metavar="IN.gguf", type=Path, help="drafter or target")
    parser.add_argument("output", metavar="OUT.gguf", type=Path, help="file to write")
    parser.add_argument("type", metavar="TYPE", help="as in llama-quantize; a drafter's matrices all get it")
    parser.add_argument(
        "--tensor-type",
        metavar="PATTERN=TYPE",
        action="append",
        default=[],
        help="another type for tensors whose name matches, such as ffn_down=q6_k; may be repeated, the first counts",
    )
    parser.add_argument("--codes-type", metavar="TYPE", help="of a drafter's token codes (default: TYPE)")
    parser.add_argument("--imatrix", metavar="FILE", type=Path, help="llama.cpp's importance matrix")
    parser.add_argument(
        "--allow-requantize", action="store_true", help="take what is quantized already: each time costs quality"
    )
    parser.add_argument("--dry-run", action="store_true", help="write nothing, print the sizes")
    parser.add_argument("--force", action="store_true", help="replace an existing regular file")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    add_threads_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Quantize and say what was written; errors are raised."""
    from dspine_local.quantize import quantize_file
    from dspine_local.quantize.overrides import TypeOverride, parse_override

    overrides = [parse_override(text) for text in args.tensor_type]
    if args.codes_type is not None:
        overrides.append(TypeOverride(r"^inject\.codes$", args.codes_type.lower()))
    with progress_bar("Quantizing", unit="steps") as progress:
        report = quantize_file(
            args.source,
            args.output,
            args.type,
            overrides=overrides,
            imatrix=args.imatrix,
            allow_requantize=args.allow_requantize,
            dry_run=args.dry_run,
            overwrite=args.force,
            n_threads=args.n_threads,
            progress=progress,
        )
    print(json.dumps(asdict(report), default=str) if args.json else report_text(report))
    return 0


def report_text(report: QuantizationReport) -> str:
    """The report for people."""
    before, after = report.bytes_before / MIB, report.bytes_after / MIB
    types = ", ".join(f"{count} {name}" for name, count in report.types.items())
    lines = [
        f"{'wrote' if report.written else 'would write'} {report.path}: {report.kind} as {report.type}, {before:,.1f} "
        f"MiB -> {after:,.1f} MiB, {report.bits_per_weight:.2f} bits per weight",
        f"tensors: {report.n_tensors} ({types})",
    ]
    if report.n_importance is not None:
        lines.append(f"importance matrix: used for {report.n_importance} tensors")
    return "\n".join([*lines, *fallback_lines(report.fallbacks)])
