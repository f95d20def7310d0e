"""Where the time of a verify round goes: SmolLM2 and the demo's drafter, drafts of 7, through the Python API.

Medians over rounds, greedy and with llama-server's default sampling. "everything else" is the part of a round that is
neither draft, verify nor commit: sampling, bookkeeping, cutting the caches back. "python" is the time between two
rounds: the step's binding, events, detokenizing, the caller's loop. Together, greedy, at most half a millisecond.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from common import environment, parser, print_environment, requantize, table

from dspine_local import GREEDY, Engine, Generation, GenerationStats, SamplingOptions
from dspine_local.convert import convert_checkpoint
from dspine_local.demo import drafter_checkpoint, smollm2_path

N_DRAFT = 7
N_SKIPPED = 5  # first rounds of a request: graphs are built, the prompt's step is still in the wall time
MAX_TOKENS = 200
N_PROMPTS = 10  # at most, to collect the rounds
LIMIT_MS = 0.2
SAMPLED = SamplingOptions(seed=1)  # llama-server's defaults
PARTS = ("draft", "verify", "commit", "everything else", "python")


def profile(engine: Engine, n_context: int, sampling: SamplingOptions, n_rounds: int) -> dict[str, Any]:
    """Medians in milliseconds over at least ``n_rounds`` rounds of answers to prompts of ``n_context`` tokens."""
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    n_drafted = n_accepted = n_counted = 0
    for prompt in prompts(engine, n_context):
        with engine.generate(prompt, sampling=sampling, cache_prompt=False, max_tokens=MAX_TOKENS) as generation:
            for now, before, wall_s in steps(generation):
                n = now.rounds - before.rounds  # more than one when a piece of text took several rounds
                if n == 0 or before.rounds < N_SKIPPED:
                    continue
                inside = [
                    now.draft_s - before.draft_s,
                    now.verify_s - before.verify_s,
                    now.commit_s - before.commit_s,
                    now.other_s - before.other_s,
                ]
                for part, value in zip(PARTS, [*inside, wall_s - sum(inside)], strict=True):
                    parts[part].append(value * 1e3 / n)
                n_counted += n
                n_drafted += now.drafted - before.drafted
                n_accepted += now.accepted - before.accepted
                if n_counted >= n_rounds:
                    break
        if n_counted >= n_rounds:
            break
    if n_counted == 0:
        raise RuntimeError(f"the answers to prompts of {n_context} tokens were too short to measure")
    return {
        "context": n_context,
        "rounds": n_counted,
        "drafted_per_round": n_drafted / n_counted,
        "acceptance_length": 1 + n_accepted / n_counted,
        **{part: median(values) for part, values in parts.items()},
    }


def prompts(engine: Engine, n_tokens: int) -> Iterator[list[int]]:
    """Parts of a long English text that every Python has, each with a request: ``n_tokens`` tokens, or a few less."""
    text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    request = "\n\nExplain this in detail."
    room = n_tokens - len(engine.tokenizer.encode_chat([{"role": "user", "content": request}]))
    n_chars = 8 * n_tokens
    for first in range(0, min(len(text) - n_chars, N_PROMPTS * n_chars), n_chars):
        tokens = engine.tokenizer.encode(text[first : first + n_chars])[: max(1, room)]
        part = b"".join(engine.tokenizer.piece(token) for token in tokens).decode(errors="ignore")
        yield engine.tokenizer.encode_chat([{"role": "user", "content": part + request}])


def steps(generation: Generation) -> Iterator[tuple[GenerationStats, GenerationStats, float]]:
    """The statistics after and before every piece of text, and the wall time between them."""
    before = None
    start = perf_counter()
    for _ in generation:
        wall_s = perf_counter() - start
        now = generation.stats
        if now is None:
            raise RuntimeError("a running request has no statistics")
        if before is not None and generation.finish_reason is None:
            yield now, before, wall_s
        before = now
        start = perf_counter()


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--contexts", type=int, nargs="+", default=[32, 512, 1500], help="prompt tokens")
    options.add_argument("--rounds", type=int, default=80)
    args = options.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="dspine-bench-") as scratch:
        work_dir = args.work_dir or Path(scratch)
        work_dir.mkdir(parents=True, exist_ok=True)
        demo = smollm2_path()
        drafter = work_dir / "drafter-q8_0.gguf"
        convert_checkpoint(drafter_checkpoint(), drafter, outtype="q8_0", target=demo, overwrite=True)
        for name, target in (("Q4_1 (demo)", demo), ("Q8_0", requantize(demo, work_dir / "target-q8_0.gguf"))):
            engine = Engine(
                target,
                drafter,
                n_ctx=max(args.contexts) + MAX_TOKENS + N_DRAFT + 1,
                n_draft=N_DRAFT,
                n_threads=args.threads,
            )
            for n_context in args.contexts:
                for how, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
                    result = profile(engine, n_context, sampling, args.rounds)
                    results.append({"target": name, "sampling": how, **result})
    passed = all(r["everything else"] + r["python"] <= LIMIT_MS for r in results if r["sampling"] == "greedy")
    if args.json:
        print(json.dumps({"environment": environment(), "results": results, "passed": passed}, indent=1))
    else:
        print_environment()
        rows = [
            [r["target"], r["sampling"], str(r["context"]), str(r["rounds"]), f"{r['acceptance_length']:.2f}"]
            + [f"{r[part]:.2f}" for part in PARTS]
            for r in results
        ]
        print("\nper round, ms\n")
        print(table(["target", "sampling", "context", "rounds", "acceptance length", *PARTS], rows))
        print(f"\ngreedy, everything else and python together at most {LIMIT_MS} ms: {'yes' if passed else 'NO'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
