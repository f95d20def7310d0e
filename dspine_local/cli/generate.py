"""``dspine-local generate``: one answer to one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dspine_local.checks import decode_utf8
from dspine_local.cli.arguments import (
    add_model_arguments,
    add_predict_argument,
    add_sampling_arguments,
    engine_options,
    given_text,
    sampling_options,
)
from dspine_local.options import GenerationOptions


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "generate",
        help="answer one prompt",
        description="Answer one prompt with a target and, if given, its drafter. The text goes to stdout as it comes, "
        "statistics to stderr.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - reads it from stdin")
    source.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("-sys", "--system-prompt", metavar="TEXT", help="system message before the prompt")
    add_predict_argument(parser, -1, "tokens at most (default: -1, no limit)")
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end at this text; may be repeated")
    parser.add_argument(
        "--raw", action="store_true", help="take the prompt as it is, without the model's chat template"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    add_model_arguments(parser, strict=True)
    add_sampling_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate; errors are raised."""
    from dspine_local.engine import Engine

    options = GenerationOptions(
        max_tokens=args.max_tokens,
        stop=[given_text("--stop", text) for text in args.stop],
        sampling=sampling_options(args),
    )
    loading = engine_options(args)
    prompt = _read_prompt(args)
    if args.raw and args.system_prompt is not None:
        raise ValueError("--system-prompt needs the chat template, which --raw leaves out")
    engine = Engine(args.model, args.model_draft, loading)
    if args.raw:
        tokens = engine.tokenizer.encode(prompt)
    else:
        system = (
            []
            if args.system_prompt is None
            else [{"role": "system", "content": given_text("--system-prompt", args.system_prompt)}]
        )
        tokens = engine.tokenizer.encode_chat([*system, {"role": "user", "content": prompt}])
    generation = engine.generate(tokens, options=options)
    with generation:
        for piece in generation:
            if not args.json:
                print(piece, end="", flush=True)
    if args.json:
        print(
            json.dumps(
                {
                    "prompt_tokens": len(generation.prompt_tokens),
                    "tokens": generation.tokens,
                    "text": generation.text,
                    "finish_reason": generation.finish_reason,
                    "stats": generation.stats.to_json() if generation.stats else None,
                },
                ensure_ascii=False,
            )
        )
    else:
        print()
        print(f"[{generation.stats}]", file=sys.stderr)
    return 0


def _read_prompt(args: argparse.Namespace) -> str:
    if args.file is not None:
        return decode_utf8(f"the file '{args.file}'", Path(args.file).read_bytes())
    if args.prompt == "-":
        if sys.stdin is None:
            raise ValueError("--prompt - reads stdin, which is closed")
        return decode_utf8("the prompt on stdin", sys.stdin.buffer.read())
    return given_text("--prompt", args.prompt)
