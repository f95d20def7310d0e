"""``dspine-local convert``: a drafter checkpoint to GGUF."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dspine_local.convert import OUTTYPES, ConversionReport, Fallback, convert_checkpoint
from dspine_local.progress import progress_bar

MIB = 1 << 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "convert",
        help="convert a drafter checkpoint to GGUF",
        description="Convert a DSpine or DFlash drafter checkpoint (config.json and safetensors, sharded or not) to a "
        "GGUF file. Memory stays small whatever the checkpoint's size, and nothing is left behind on failure.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT_DIR", type=Path, help="folder of the checkpoint")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT.gguf",
        type=Path,
        required=True,
        help="file to write; of a symbolic link, the file that it leads to",
    )
    parser.add_argument(
        "--outtype",
        type=str.lower,
        choices=list(OUTTYPES),
        default="q8_0",
        help="type of the weight matrices; norms and biases stay f32, and matrices whose rows "
        "do not divide into the type's blocks get the next larger type",
    )
    parser.add_argument(
        "--target",
        metavar="TARGET.gguf",
        type=Path,
        help="check width, layers and vocabulary against this target, and remember its vocabulary in the drafter",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing regular file")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert and say what was written; errors are raised."""
    with progress_bar("Converting") as progress:
        report = convert_checkpoint(
            args.checkpoint,
            args.output,
            outtype=args.outtype,
            target=args.target,
            progress=progress,
            overwrite=args.force,
        )
    print(json.dumps(asdict(report), default=str) if args.json else report_text(report))
    return 0


def report_text(report: ConversionReport) -> str:
    """The report for people: what was written, then each kind of fallback on one line."""
    types = ", ".join(f"{count} {name}" for name, count in report.types.items())
    kind = "DSpine" if report.injection else "DFlash"
    lines = [
        f"wrote {report.path}: {kind} drafter '{report.name}', {report.n_parameters:,} parameters, "
        f"{report.n_bytes / MIB:.1f} MiB",
        f"tensors: {report.n_tensors} ({types})",
    ]
    if report.target is not None:
        lines.append(f"checked against target {report.target}")
    return "\n".join([*lines, *fallback_lines(report.fallbacks)])


def fallback_lines(fallbacks: Sequence[Fallback]) -> list[str]:
    """Each kind of fallback on one line."""
    kinds = Counter((fallback.wanted, fallback.got, fallback.reason) for fallback in fallbacks)
    lines = []
    for (wanted, got, reason), count in kinds.items():
        example = next(f.tensor for f in fallbacks if (f.wanted, f.got, f.reason) == (wanted, got, reason))
        counted = f"{count} tensors" if count > 1 else "1 tensor"
        lines.append(f"note: {counted} stored as {got} instead of {wanted}, e.g. {example}: {reason}")
    return lines
