"""``dspine-local audit``: how verification in batches differs from decoding one by one."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspine_local.cli import EXIT_DONE
from dspine_local.cli.arguments import add_model_arguments, add_parallel_argument, add_predict_argument, engine_options

if TYPE_CHECKING:
    from dspine_local._native import Target
    from dspine_local.audit import AuditResult
    from dspine_local.options import EngineOptions

EXIT_FLIPS = 3
LONGEST_DRAFT = 15  # without a drafter


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "audit",
        help="measure how verifying in batches differs from decoding one by one",
        description="Decode the same tokens one by one and in batches of 2 to 16, as drafts are verified, and compare "
        "the logits bit by bit: behind prompts, and at places ever further into the context (-c). The result is kept "
        "for --strict. Nothing is drafted: of a drafter only the block's length is read. Exit code 0: measured, no "
        "most likely token changed; 3: some did.",
    )
    parser.add_argument("--prompts", metavar="PATH", type=Path, help="JSONL (default: the project's own)")
    parser.add_argument("--limit", metavar="N", type=int, default=1, help="prompts per category (default: 1)")
    add_predict_argument(parser, 64)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(parser, drafter="its drafter, for the taps and the longest draft", draft_length=False)
    add_parallel_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Audit; errors are raised."""
    from dspine_local.audit import chat_cases, deep_cases, measure
    from dspine_local.audit.record import write_audit
    from dspine_local.checks import need_integer
    from dspine_local.evaluation.prompts import load_prompts, own_prompts
    from dspine_local.files import checked_path
    from dspine_local.loading import load_target, longest_draft
    from dspine_local.progress import progress_bar
    from dspine_local.tokenizer import Tokenizer

    need_integer("max_tokens", args.max_tokens, 1)
    need_integer("limit", args.limit, 1)
    options = replace(engine_options(args), n_parallel=args.n_parallel)
    prompts = load_prompts(own_prompts() if args.prompts is None else args.prompts, limit=args.limit)
    drafter = None if args.model_draft is None else str(checked_path(args.model_draft))
    n_draft = LONGEST_DRAFT if drafter is None else longest_draft(drafter, None)
    target = load_target(str(checked_path(args.model)), drafter, options, n_draft)
    tokenizer = Tokenizer(target)
    questions = [prompt.turns[0] for prompt in prompts]
    cases = chat_cases(tokenizer, questions, args.max_tokens, target.n_ctx_seq)
    n_skipped = len(questions) - len(cases)
    cases += deep_cases(tokenizer, target.n_ctx_seq)
    with progress_bar("Auditing", unit="steps") as report:
        result = measure(target, cases, range(2, n_draft + 2), report=report)
    if not any(batch.rows for batch in result.batches):
        raise ValueError(f"a context of {target.n_ctx_seq} positions is too small to audit anything: give a larger -c")
    kept = write_audit(target, options, result)
    if args.json:
        print(json.dumps({**_setting(target.path, options, target), **result.to_json(), "record": kept and str(kept)}))
    else:
        _print(result, target.n_ctx_seq, kept)
        if n_skipped:
            print(f"{n_skipped} prompts did not fit the context: give a larger -c", file=sys.stderr)
    return EXIT_FLIPS if result.n_flips else EXIT_DONE


def _setting(path: str, options: EngineOptions, target: Target) -> dict[str, Any]:
    """What was measured."""
    from dspine_local.machine import processor

    return {
        "model": path,
        "processor": processor(),
        "n_ctx": target.n_ctx_seq,
        "n_threads": [target.n_threads, target.n_threads_batch],
        "flash_attn": options.flash_attn,
        "cache_types": [options.cache_type_k, options.cache_type_v],
    }


def _print(result: AuditResult, n_ctx: int, kept: Path | None) -> None:
    from dspine_local.audit.table import audit_table
    from dspine_local.audit.words import exactness_in_words
    from dspine_local.cli.console import OutputConsole

    OutputConsole().print(audit_table(result, n_ctx))
    longest = max((batch.n_draft for batch in result.batches), default=0)
    print(f"Draft lengths for --strict: {exactness_in_words(result.ranges(longest), n_ctx)}.")
    print(f"Most likely tokens that changed: {result.n_flips}.")
    if kept is not None:
        print(f"Kept in '{kept}'.")
