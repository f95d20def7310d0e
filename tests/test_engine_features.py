"""The engine feeds its drafter what a loop written out by hand does: the same features, so the same drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import DrafterFactory, SmolFactory, TargetFactory
from engine_rig import PROMPT, ask, drafting_engine, open_target

from dspine_local._native import Drafter, Target
from dspine_local.convert import convert_checkpoint

N_TOKENS = 48


def by_hand(target: Target, drafter: Drafter, prompt: list[int], n_draft: int) -> tuple[list[int], list[int]]:
    """Greedy decode, taps, commit, draft, verify: the tokens, and how many each round accepted."""
    target.truncate(0, 0)
    drafter.truncate(0, 0)
    target.enable_taps(drafter.target_layers)

    def read(tokens: list[int], n_outputs: int) -> tuple[list[int], np.ndarray]:
        logits = target.decode(0, tokens, n_outputs=n_outputs)
        features = np.concatenate([target.taps(t, len(tokens)) for t in range(drafter.n_taps)], axis=1)
        return [int(row.argmax()) for row in logits], features

    choices, features = read(prompt, 1)
    drafter.commit(0, features)
    answer, accepted = choices[:1], []
    while len(answer) < N_TOKENS:
        n = min(n_draft, N_TOKENS - len(answer) - 1)
        draft = drafter.draft([(0, answer[-1])], n)[0].tokens if n else []
        choices, features = read([answer[-1], *draft], len(draft) + 1)
        n_right = next((i for i, token in enumerate(draft) if token != choices[i]), len(draft))
        target.truncate(0, target.length(0) - (len(draft) - n_right))
        drafter.commit(0, features[: n_right + 1])
        answer += choices[: n_right + 1]
        accepted.append(n_right)
    return answer, accepted


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
@pytest.mark.parametrize("n_draft", [1, 4, 15])
def test_the_same_drafts(
    tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path: Path, arch: str, n_draft: int
) -> None:
    tiny = tiny_target(arch, "q8_0")
    target = open_target(tiny)
    gguf = tmp_path / "drafter.gguf"
    convert_checkpoint(tiny_drafter(tiny), gguf, outtype="f32")
    drafter = Drafter(str(gguf), target.tensors(), n_ctx=512, n_threads=1)
    prompt = target.tokenize(PROMPT)
    tokens, accepted = by_hand(target, drafter, prompt, n_draft)
    answer = ask(drafting_engine(target, drafter, n_draft), prompt, max_tokens=N_TOKENS)
    assert answer.tokens == tokens
    assert [len(step) - 1 for step in answer.steps[-len(accepted) :]] == accepted


@pytest.mark.slow
def test_the_same_drafts_of_a_trained_drafter(smollm2: SmolFactory, trained_drafter: Path) -> None:
    """A random drafter is never right; this one is, in part, and only with the right features."""
    target = Target(str(smollm2("q8_0")), n_ctx=512, n_rollback=7, n_ubatch=32, flash_attn="on")
    drafter = Drafter(str(trained_drafter), target.tensors(), n_ctx=512)
    prompt = target.tokenize(
        "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n", parse_special=True
    )
    tokens, accepted = by_hand(target, drafter, prompt, 7)
    answer = ask(drafting_engine(target, drafter, 7), prompt, max_tokens=N_TOKENS)
    assert answer.tokens == tokens
    assert [len(step) - 1 for step in answer.steps[-len(accepted) :]] == accepted
    assert sum(accepted) >= 5
