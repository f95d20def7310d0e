"""What stays between rounds and requests: prefix reuse, rollback, full contexts, counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conftest import TargetFactory
from engine_rig import (
    MAX_DRAFT,
    PROMPT,
    Answer,
    ask,
    assert_in_step,
    check_stats,
    drafting_engine,
    first_right,
    guessing,
    open_target,
    perfect,
    sampling,
    scripts,
)
from tiny_models import ARCHITECTURES, TinyTarget

from dspine_local._native import ContextLengthError, Engine, Target

pytestmark = pytest.mark.native

OTHER = "What is the capital of France, and how many people live there? 12345 67890 + 3.14 = ?"
Open = Callable[..., tuple[TinyTarget, Target]]


@pytest.fixture(scope="module")
def opened(tiny_target: TargetFactory) -> Open:
    """A tiny q8_0 target with these options, made once."""
    made: dict[str, tuple[TinyTarget, Target]] = {}

    def get(arch: str, special_gain: float = 0.2, **options: int) -> tuple[TinyTarget, Target]:
        key = repr((arch, special_gain, sorted(options.items())))
        if key not in made:
            tiny = tiny_target(arch, "q8_0", special_gain=special_gain)
            made[key] = (tiny, open_target(tiny, **options))
        return made[key]

    return get


def counts(answer: Answer) -> tuple[int, int, int, int, list[int]]:
    stats = answer.final
    return stats.n_generated, stats.n_rounds, stats.n_drafted, stats.n_accepted, list(stats.accepted_at)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_second_request_equals_a_fresh_one(opened: Open, arch: str) -> None:
    """Neither tokens nor draft counts depend on what the slot did before."""
    tiny, target = opened(arch)
    a, b = target.tokenize(PROMPT), target.tokenize(OTHER)
    whole = [p + ask(Engine(target), p, max_tokens=60).tokens for p in (a, b)]

    def script(seq: int, tokens: list[int], n: int) -> list[int]:  # right on every third position, whatever came before
        right = perfect(*whole)(seq, tokens, n)
        return [t if (len(tokens) + i) % 3 else (t + 1) % tiny.n_vocab for i, t in enumerate(right)]

    fresh = ask(drafting_engine(target, script), b, max_tokens=60)
    engine = drafting_engine(target, script)
    for _ in range(3):
        ask(engine, a, max_tokens=60)
        second = ask(engine, b, max_tokens=60)
        assert second.tokens == fresh.tokens == whole[1][len(b) :]
        assert counts(second) == counts(fresh)
        assert second.final.n_reused == 0
        assert_in_step(engine)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_next_turn_reuses_the_answer(opened: Open, arch: str) -> None:
    """Everything but the last token, which no cache has seen, drafting or not, hybrid or not."""
    tiny, target = opened(arch)
    prompt = target.tokenize(PROMPT)
    plain = Engine(target)
    turn = target.tokenize(" And then?")
    first = ask(plain, prompt, max_tokens=40)
    history = prompt + first.tokens
    second = ask(plain, history + turn, max_tokens=40)
    assert second.final.n_reused == len(history) - 1
    for script in scripts(tiny.n_vocab, history, history + turn + second.tokens).values():
        engine = drafting_engine(target, script)
        assert ask(engine, prompt, max_tokens=40).tokens == first.tokens
        answer = ask(engine, history + turn, max_tokens=40)
        assert answer.tokens == second.tokens
        assert answer.final.n_reused == second.final.n_reused
        assert_in_step(engine)


def test_an_end_token_and_junk_behind_it(opened: Open) -> None:
    """A block that runs past the end ends there, and leaves nothing behind."""
    tiny, target = opened("llama", special_gain=2.0)
    prompt = target.tokenize("Hello")
    plain = ask(Engine(target), prompt)
    assert plain.finish_reason == "stop"
    assert target.is_end_of_generation(plain.tokens[-1])
    assert not any(target.is_end_of_generation(t) for t in plain.tokens[:-1])
    whole = prompt + plain.tokens
    turn = target.tokenize("\nAgain")
    for n_draft in range(1, MAX_DRAFT + 1):

        def script(seq: int, tokens: list[int], n: int) -> list[int]:
            return (perfect(whole)(seq, tokens, n) + [tiny.eos_id, 7, 7, 7] * 4)[:n]

        engine = drafting_engine(target, script, n_draft)
        answer = ask(engine, prompt)
        assert (answer.tokens, answer.finish_reason) == (plain.tokens, "stop")
        check_stats(answer)
        assert engine.lengths(0) == (len(whole) - 1, len(whole) - 1)
        again = ask(engine, whole + turn, max_tokens=5)
        assert again.final.n_reused == len(whole) - 1
        assert again.tokens == ask(Engine(target), whole + turn, max_tokens=5, cache_prompt=False).tokens


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_changed_history_is_read_again(opened: Open, arch: str) -> None:
    """What a hybrid cannot cut back to is read from the start, with the same answer."""
    tiny, target = opened(arch)
    prompt, fork = target.tokenize(PROMPT), target.tokenize(PROMPT)[:-4] + target.tokenize(" cat")
    expected = ask(Engine(target), fork, max_tokens=30).tokens
    plain, engine = Engine(target), None
    reused = []
    for _ in range(2):
        engine = plain if engine is None else drafting_engine(target, guessing(1, tiny.n_vocab, fork + expected))
        ask(engine, prompt, max_tokens=30)
        answer = ask(engine, fork, max_tokens=30)
        assert answer.tokens == expected
        reused.append(answer.final.n_reused)
        assert ask(engine, fork, max_tokens=30, cache_prompt=False).final.n_reused == 0
        assert_in_step(engine)
    assert reused == ([0, 0] if arch == "qwen35" else [len(prompt) - 4] * 2)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_rollback_depth_equals_a_replay(opened: Open, arch: str) -> None:
    """On the target itself: every depth equals a replay."""
    _, target = opened(arch)
    prompt = target.tokenize(PROMPT)
    draft = list(range(100, 116))
    for depth in range(MAX_DRAFT + 1):
        logits = []
        for rows in (16, 16 - depth):
            target.truncate(0, 0)
            target.decode(0, prompt)
            target.decode(0, draft[:rows], n_outputs=rows)
            cut = rows - (16 - depth)
            n = target.length(0) - cut
            assert target.reusable(0, n) == n
            target.truncate(0, n)
            assert target.length(0) == len(prompt) + 16 - depth
            logits.append(np.concatenate([target.decode(0, [t]) for t in (50, 51, 52)]))
        np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-4)
    target.truncate(0, 0)


def test_a_hybrid_refuses_deeper_cuts(opened: Open) -> None:
    _, target = opened("qwen35")
    target.truncate(0, 0)
    target.decode(0, target.tokenize(PROMPT))
    n = target.length(0)
    target.decode(0, list(range(100, 116)))
    for depth in (16, 17, 20):
        assert target.reusable(0, n + 16 - depth) == 0
        with pytest.raises(ValueError, match=f"has {n + 16} positions and cannot be cut back to {n + 16 - depth}"):
            target.truncate(0, n + 16 - depth)
    assert target.length(0) == n + 16
    target.truncate(0, n + 6)
    assert target.reusable(0, n + 5) == 0  # no second cut before the next decode
    target.truncate(0, 0)
    assert target.length(0) == 0


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_a_full_context(opened: Open, arch: str) -> None:
    """Whatever room is left, the answer fills it and ends with "length"."""
    tiny, target = opened(arch, n_ctx=64)
    assert target.n_ctx_seq == 64
    text = (target.tokenize(PROMPT + OTHER) * 3)[:63]
    for n_prompt in (*range(1, 64, 7), *range(48, 64)):
        prompt = text[:n_prompt]
        plain = ask(Engine(target), prompt)
        assert plain.finish_reason == "length"
        assert len(prompt) + len(plain.tokens) == 64
        for script in (perfect(prompt + plain.tokens), first_right(0, tiny.n_vocab, prompt + plain.tokens)):
            engine = drafting_engine(target, lambda s, t, n, f=script: (f(s, t, n) + [3] * n)[:n])
            answer = ask(engine, prompt)
            assert (answer.tokens, answer.finish_reason) == (plain.tokens, "length")
            check_stats(answer)
            assert engine.lengths(0) == (63, 63)


def test_a_prompt_that_does_not_fit_is_refused_alone(opened: Open) -> None:
    """A prompt that does not fit is refused; the others go on."""
    tiny, target = opened("llama", n_ctx=128, n_seq=2)
    prompt = target.tokenize(PROMPT)
    plain = ask(Engine(target), prompt, max_tokens=20)
    engine = drafting_engine(target, guessing(2, tiny.n_vocab, prompt + plain.tokens))
    running = engine.submit(prompt, sampling(), max_tokens=20)
    answer = Answer()
    while engine.has_work():
        with pytest.raises(ContextLengthError, match="prompt has 64 tokens, the context holds 64 with the answer"):
            engine.submit([5] * 64, sampling())
        for event in engine.step():
            assert event.id == running
            answer.add(event)
    assert answer.tokens == plain.tokens
    assert ask(engine, [5] * 63, max_tokens=9).finish_reason == "length"


@pytest.mark.parametrize("n_draft", [0, 7])
def test_max_tokens(opened: Open, n_draft: int) -> None:
    _, target = opened("llama")
    prompt = target.tokenize(PROMPT)
    plain = ask(Engine(target), prompt, max_tokens=30).tokens
    engine = drafting_engine(target, perfect(prompt + plain))
    for n in range(12):
        answer = ask(engine, prompt, max_tokens=n, n_draft=n_draft)
        assert (answer.tokens, answer.finish_reason) == (plain[:n], "length")
        check_stats(answer)
        assert engine.lengths(0)[0] == len(prompt) + max(0, n - 1)


def test_stop_tokens(opened: Open) -> None:
    """A stop token ends the answer wherever it falls in a block, and is its last token."""
    _, target = opened("qwen3")
    prompt = target.tokenize(PROMPT)
    plain = ask(Engine(target), prompt, max_tokens=30).tokens
    engine = drafting_engine(target, perfect(prompt + plain))
    for at in range(12):
        stop = plain[at]
        expected = plain[: plain.index(stop) + 1]
        for n_draft in (0, 1, 5, MAX_DRAFT):
            answer = ask(engine, prompt, max_tokens=30, stop_tokens=[383, stop], n_draft=n_draft)
            assert (answer.tokens, answer.finish_reason) == (expected, "stop")
            check_stats(answer)
            assert engine.lengths(0)[0] == len(prompt) + len(expected) - 1


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_drafting_is_chosen_per_request(opened: Open, arch: str) -> None:
    """Without drafting the drafter's cache is left alone; the next request that drafts is not misled by it."""
    tiny, target = opened(arch)
    prompt = target.tokenize(PROMPT)
    tokens = ask(Engine(target), prompt, max_tokens=40).tokens
    engine = drafting_engine(target, guessing(3, tiny.n_vocab, prompt + tokens))
    history = prompt
    for i, n_draft in enumerate((0, 7, 0, 0, MAX_DRAFT, 1, 0, 7)):
        answer = ask(engine, history, max_tokens=5, n_draft=n_draft)
        assert answer.tokens == tokens[5 * i : 5 * i + 5]
        assert (answer.final.n_drafted > 0) is (n_draft > 0) or n_draft == 1
        if n_draft:
            assert_in_step(engine)
        history = history + answer.tokens


def test_no_draft_is_longer_than_what_can_be_emitted(opened: Open) -> None:
    _, target = opened("llama")
    asked: list[int] = []

    def script(_seq: int, _tokens: list[int], n: int) -> list[int]:
        asked.append(n)
        return []

    answer = ask(drafting_engine(target, script, 7), target.tokenize(PROMPT), max_tokens=10)
    assert len(answer.tokens) == 10
    assert answer.final.n_drafted == 0
    assert asked == [7, 7, 6, 5, 4, 3, 2, 1]


def test_the_callback_sees_the_sequence_so_far(opened: Open) -> None:
    _, target = opened("llama")
    prompt = target.tokenize(PROMPT)
    seen: list[list[int]] = []

    def script(_seq: int, tokens: list[int], n: int) -> list[int]:
        seen.append(tokens)
        return [1] * n

    answer = ask(drafting_engine(target, script, 4), prompt, max_tokens=10)
    whole = prompt + answer.tokens
    assert all(tokens == whole[: len(tokens)] for tokens in seen)
    assert [len(tokens) for tokens in seen] == [len(prompt) + 1 + i for i in range(len(seen))]


def test_a_long_prompt_is_read_in_chunks(opened: Open) -> None:
    tiny, target = opened("qwen35", n_batch=32)
    prompt = (target.tokenize(PROMPT + OTHER) * 4)[:150]
    plain = ask(Engine(target), prompt, max_tokens=20)
    engine = drafting_engine(target, guessing(4, tiny.n_vocab, prompt + plain.tokens))
    answer = ask(engine, prompt, max_tokens=20)
    assert answer.tokens == plain.tokens
    assert answer.final.n_prompt == 150
    assert answer.steps[0] == plain.tokens[:1]
    assert_in_step(engine)
