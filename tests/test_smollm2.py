"""A real model and the trained drafter: the same tokens as plain decoding, in fewer rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import SmolFactory
from engine_rig import ask, assert_in_step, check_stats, finish, sampling

from dspine_local._native import Drafter, Engine, Target

N_TOKENS = 128
N_SLOTS = 5
N_CTX = 512  # above it, llama.cpp's CPU attention of a single token takes another path and rounds differently
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a child.",
    "List five fruits and their colours.",
    "Write a Python function that returns the sum of a list.",
    "Why is the sky blue?",
    "Tell me a story about a lost dog.",
    "What is 12 times 7? Show your steps.",
    "Give me three tips for sleeping better.",
    "Translate 'good morning, my friend' into Spanish.",
)


def chat(target: Target, question: str) -> list[int]:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return target.tokenize(text, parse_special=True)


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["q8_0", "q4_0"])
def test_the_same_tokens_in_fewer_rounds(smollm2: SmolFactory, trained_drafter: Path, qtype: str) -> None:
    """Alone without a drafter, five chats at once with it."""
    target = Target(
        str(smollm2(qtype)),
        n_ctx=N_SLOTS * N_CTX,
        n_seq=N_SLOTS,
        n_rollback=7,
        n_ubatch=32,
        flash_attn="on",
        n_threads=2,
    )
    drafter = Drafter(str(trained_drafter), target.tensors(), n_seq=N_SLOTS, n_ctx=N_CTX, n_threads=2)
    engine = Engine(target, drafter, n_draft=7)
    prompts = [chat(target, question) for question in QUESTIONS]
    plain = [ask(engine, prompt, max_tokens=N_TOKENS, n_draft=0) for prompt in prompts]
    assert all(len(a.tokens) > 3 for a in plain)
    means = {}
    for n_draft in (7, 3):
        ids = [engine.submit(prompt, sampling(), max_tokens=N_TOKENS, n_draft=n_draft) for prompt in prompts]
        drafted = finish(engine, ids)
        for question, answer, expected in zip(QUESTIONS, drafted, plain, strict=True):
            assert (answer.tokens, answer.finish_reason) == (expected.tokens, expected.finish_reason), question
            check_stats(answer)
        assert_in_step(engine)
        means[n_draft] = np.mean([(len(a.tokens) - 1) / a.final.n_rounds for a in drafted])
    assert means[7] > 1.3, means
    assert 1.2 < means[3] <= means[7] + 0.05, means
