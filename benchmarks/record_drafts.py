"""Records what a drafter would have drafted behind every token of the target's greedy answers, and how much was right.

    python benchmarks/record_drafts.py TARGET.gguf DRAFTER.gguf OUT.npz [--prompts DIR] [--per-category N] [-n TOKENS]

Such traces replay the draft-length policy offline, without a clock (tests/policy_rig.py). OUT has, over all answers in
one row, ``probabilities`` float16 [n, K], ``n_right`` uint8 [n] and ``starts`` int32: where each answer begins.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from dspine_local import Engine, SamplingOptions, _native
from dspine_local.evaluation.prompts import load_prompts
from dspine_local.progress import progress_bar

CHECKOUT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=Path, default=CHECKOUT / "benchmarks" / "prompts")
    parser.add_argument("--per-category", type=int, default=4)
    parser.add_argument("-n", dest="max_tokens", type=int, default=96)
    args = parser.parse_args()

    n_ctx = 2048
    engine = Engine(args.target, args.drafter, n_ctx=n_ctx)
    target = _native.Target(args.target, n_ctx=n_ctx, flash_attn="on")
    drafter = _native.Drafter(args.drafter, target.tensors(), n_ctx=n_ctx)
    target.enable_taps(drafter.target_layers)
    counts: dict[str, int] = {}
    probabilities, n_right, starts = [], [], []
    with progress_bar("Drafting", unit="steps") as report:
        prompts = load_prompts(args.prompts)
        for done, prompt in enumerate(prompts):
            report(done, len(prompts), prompt.category)
            counts[prompt.category] = counts.get(prompt.category, 0) + 1
            if counts[prompt.category] > args.per_category:
                continue
            answer = engine.chat(
                [{"role": "user", "content": prompt.turns[0]}],
                n_draft=0,
                max_tokens=args.max_tokens,
                sampling=SamplingOptions(temperature=0),
            )
            answer.read()
            starts.append(len(n_right))
            target.truncate(0, 0)
            drafter.truncate(0, 0)
            read(target, drafter, answer.prompt_tokens)
            for i, anchor in enumerate(answer.tokens[:-1]):
                draft = drafter.draft([(0, anchor)], drafter.max_draft)[0]
                following = answer.tokens[i + 1 :]
                agree = [a == b for a, b in zip(draft.tokens, following, strict=False)]
                n_right.append(agree.index(False) if False in agree else len(agree))
                probabilities.append(draft.probabilities)
                read(target, drafter, [anchor])
    np.savez_compressed(
        args.out,
        probabilities=np.array(probabilities, dtype=np.float16),
        n_right=np.array(n_right, dtype=np.uint8),
        starts=np.array(starts, dtype=np.int32),
    )
    print(f"{len(n_right)} drafts of {len(starts)} answers, {1 + np.mean(n_right):.3f} tokens each")


def read(target: _native.Target, drafter: _native.Drafter, tokens: list[int]) -> None:
    """Append tokens to both caches."""
    target.decode(0, tokens)
    taps = [target.taps(i, len(tokens)) for i in range(drafter.n_taps)]
    drafter.commit(0, np.concatenate(taps, axis=1))


if __name__ == "__main__":
    main()
