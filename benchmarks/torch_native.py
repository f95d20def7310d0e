"""A trained drafter's drafts in PyTorch against the native drafter's, behind the target's own answers.

    python benchmarks/torch_native.py TARGET.gguf CHECKPOINT [--blocks 200] [--json]

Both get the same features, the native one weights, keys and values in F32. Give an F32 target: with a quantized output
matrix ggml also rounds the activations, and PyTorch does not. A chain of choices that parts once goes on apart, so what
counts is the first difference of a block, with the score margin by which PyTorch preferred its token.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from dspine_local import Engine, SamplingOptions, _native
from dspine_local.convert import convert_checkpoint
from dspine_local.evaluation.prompts import load_prompts
from dspine_local.train.acceptance import greedy_draft
from dspine_local.train.export import load_checkpoint
from dspine_local.train.features import FeatureReader
from dspine_local.train.model import Drafter
from dspine_local.train.weights import TargetWeights

PROMPTS = Path(__file__).parent / "prompts"
STEP = 6  # tokens from one block to the next
MAX_TOKENS = 64


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    shape, weights = load_checkpoint(args.checkpoint)
    drafter = Drafter(shape)
    drafter.load_state_dict(weights)
    stored = TargetWeights(args.target)
    embedding, head = torch.tensor(stored.embedding), torch.tensor(stored.head)
    n_draft = shape.block_size - 1
    engine = Engine(args.target, n_ctx=512)
    reader = FeatureReader(args.target, shape.taps)
    target = _native.Target(str(args.target), n_ctx=512)
    with tempfile.TemporaryDirectory(prefix="dspine-parity-") as scratch:
        path = Path(scratch) / "drafter.gguf"
        convert_checkpoint(args.checkpoint, path, outtype="f32", target=args.target)
        native = _native.Drafter(str(path), target.tensors(), n_ctx=512, cache_type="f32")

    n_blocks = n_same = 0
    margins: list[float] = []  # of the first difference of a block
    for prompt in load_prompts(PROMPTS):
        if n_blocks >= args.blocks:
            break
        answer = engine.chat(
            [{"role": "user", "content": prompt.turns[0]}],
            max_tokens=MAX_TOKENS,
            sampling=SamplingOptions(temperature=0),
        )
        answer.read()
        tokens = answer.prompt_tokens + answer.tokens
        taps, _ = reader.read(tokens)
        context = drafter.context(torch.tensor(taps)[None], torch.arange(len(taps))[None])
        native.truncate(0, 0)
        for place in range(len(answer.prompt_tokens), len(tokens), STEP):
            native.commit(0, taps[native.length(0) : place])
            anchor = torch.tensor([tokens[place]])
            out = drafter(
                [(k[:, :place], v[:, :place]) for k, v in context],
                torch.tensor([[place]]),
                embedding[anchor][None],
                embedding[shape.mask_token_id],
                drafter.code(anchor)[None] if shape.injection else None,
            )
            expected = greedy_draft(drafter, out, head, anchor, n_draft)[0].tolist()
            found = native.draft([(0, tokens[place])], n_draft)[0].tokens
            same = [a == b for a, b in zip(found, expected, strict=True)]
            n_blocks += 1
            n_same += sum(same)
            if not all(same):
                j = same.index(False)
                margins.append(margin(drafter, out, head, [tokens[place], *expected], found[j], j))
            if n_blocks >= args.blocks:
                break
    result = {
        "blocks": n_blocks,
        "proposals": n_blocks * n_draft,
        "identical": n_same / (n_blocks * n_draft),
        "blocks_that_differ": len(margins),
        "largest_margin": max(margins, default=0.0),
    }
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"{n_same} of {result['proposals']} proposals in {n_blocks} blocks identical ({result['identical']:.2%}); "
        f"{len(margins)} blocks differ, where the scores were at most {result['largest_margin']:.2g} apart"
    )


def margin(drafter: Drafter, out: object, head: torch.Tensor, path: list[int], other: int, j: int) -> float:
    """How much higher PyTorch scored its own token at position j (0-based) than ``other``."""
    hidden = out.hidden[:, 0, j + 1]  # type: ignore[attr-defined]
    if not drafter.shape.injection:
        u = hidden[0]
    else:
        previous = torch.tensor([path[j]])
        pre, readout = out.pre[-1][:, 0, j + 1], out.readouts[-1][:, 0, j]  # type: ignore[attr-defined]
        u = drafter.refine(pre, readout, drafter.code(previous))[0]
    return float(head[path[j + 1]] @ u - head[other] @ u)


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
