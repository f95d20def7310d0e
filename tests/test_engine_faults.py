"""Drafters that fail or write junk, samplers that fail: the request they hit ends, the engine and the others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    finish,
    open_target,
    perfect,
    sampling,
    scripted,
    step_into,
)
from tiny_models import TinyTarget

from dspine_local._native import Engine, SamplingParams, Target

pytestmark = pytest.mark.native

N_TOKENS = 30
FINITE = 'root ::= "abc" "de"\n'
Opened = tuple[TinyTarget, Target]


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def opened(request: pytest.FixtureRequest, tiny_target: TargetFactory) -> Opened:
    tiny = tiny_target(request.param, "q8_0")
    return tiny, open_target(tiny, n_ctx=1024, n_seq=2)


def break_off(_tokens: list[int], _n: int) -> Any:
    raise RuntimeError("the drafter is on strike")


JUNK: dict[str, tuple[Callable[[list[int], int], Any], str]] = {
    "raises": (break_off, "the drafter is on strike"),
    "negative": (lambda _t, n: [-1] * n, "token -1 is outside the vocabulary"),
    "too_large": (lambda _t, n: [3] * (n - 1) + [384], "token 384 is outside the vocabulary"),
    "huge": (lambda _t, n: [2**31 - 1] * n, "outside the vocabulary"),
    "not_32_bits": (lambda _t, n: [2**40] * n, ""),
    "none": (lambda _t, _n: None, ""),
    "text": (lambda _t, _n: "hello", ""),
    "floats": (lambda _t, n: [1.5] * n, ""),
}


@pytest.mark.parametrize("what", JUNK)
def test_a_bad_drafter_ends_its_request(opened: Opened, what: str) -> None:
    tiny, target = opened
    junk, message = JUNK[what]
    prompt = target.tokenize(PROMPT)
    plain = ask(Engine(target), prompt, max_tokens=N_TOKENS).tokens
    right = perfect(prompt + plain)
    broken = True

    def script(seq: int, tokens: list[int], n: int) -> list[int]:
        if broken and len(tokens) > len(prompt) + 8:
            return junk(tokens, n)  # type: ignore[no-any-return]
        return right(seq, tokens, min(n, 3)) + [tiny.mask_id] * (n > 3)

    engine = drafting_engine(target, script, 7)
    answer = ask(engine, prompt, max_tokens=N_TOKENS)
    assert answer.finish_reason == "error"
    assert message in answer.error
    assert answer.error
    assert answer.tokens == plain[: len(answer.tokens)]
    assert 8 <= len(answer.tokens) < N_TOKENS
    check_stats(answer)
    assert_in_step(engine)
    broken = False
    again = ask(engine, prompt, max_tokens=N_TOKENS)
    assert again.tokens == plain
    turn = ask(engine, [*prompt, *plain, 5, 6], max_tokens=5)
    assert turn.final.n_reused == len(prompt) + len(plain) - 1
    assert_in_step(engine)


@pytest.mark.parametrize("what", JUNK)
def test_a_bad_draft_leaves_the_other_slot_alone(opened: Opened, what: str) -> None:
    """A failure ends only the requests that it hits: not one that reads its prompt, nor one without drafts."""
    _, target = opened
    junk, _ = JUNK[what]
    a, b = target.tokenize(PROMPT), target.tokenize("Once upon a time")
    expected = ask(Engine(target), b, max_tokens=N_TOKENS).tokens
    engine = drafting_engine(target, lambda _s, t, n: junk(t, n) if len(t) > len(a) + 4 else [], 7)
    answers: dict[int, Answer] = {}
    plain = engine.submit(b, sampling(), max_tokens=N_TOKENS, n_draft=0)
    step_into(engine, answers)
    drafting = engine.submit(a, sampling(), max_tokens=N_TOKENS)
    while engine.has_work():
        step_into(engine, answers)
    assert answers[drafting].finish_reason == "error"
    assert (answers[plain].tokens, answers[plain].finish_reason) == (expected, "length")


def test_surplus_and_missing_tokens_are_no_error(opened: Opened) -> None:
    tiny, target = opened
    prompt = target.tokenize(PROMPT)
    plain = ask(Engine(target), prompt, max_tokens=N_TOKENS)
    whole = prompt + plain.tokens
    for script in (
        lambda s, t, n: perfect(whole)(s, t, n) + [-7] * 100,  # what lies behind the draft asked for is not read
        lambda s, t, n: perfect(whole)(s, t, n)[: n // 2],
        lambda _s, _t, _n: [],
        lambda s, t, _n: [*perfect(whole)(s, t, 200), tiny.n_vocab],
    ):
        engine = drafting_engine(target, script, 5)
        answer = ask(engine, prompt, max_tokens=N_TOKENS)
        assert answer.tokens == plain.tokens
        check_stats(answer)
        assert max(len(step) for step in answer.steps) <= 6
        assert_in_step(engine)


def test_drafts_of_fewer_slots_than_the_target(opened: Opened) -> None:
    """A drafter made for one sequence cannot serve two: said at once, not in the second request."""
    _, target = opened
    with pytest.raises((ValueError, IndexError)):
        Engine(target, scripted(lambda _s, _t, _n: [], n_seq=1), n_draft=3)


def dead_end() -> SamplingParams:
    """After "abcde" the grammar allows the end only, and the bias forbids it: nothing is left to choose."""
    return sampling(grammar=FINITE, ignore_eos=True)


@pytest.mark.parametrize("n_draft", [0, 4, MAX_DRAFT])
def test_a_sampler_that_fails_ends_its_request(opened: Opened, n_draft: int) -> None:
    _, target = opened
    a, b = target.tokenize(PROMPT), target.tokenize("Once upon a time")
    plain = Engine(target)
    expected = ask(plain, b, max_tokens=N_TOKENS).tokens
    letters = ask(plain, a, sampling(grammar=FINITE), max_tokens=N_TOKENS).tokens
    assert b"".join(target.piece(t) for t in letters) == b"abcde"
    engine = drafting_engine(target, lambda s, t, n: (perfect(a + letters[:-1], b + expected)(s, t, n) + [9] * n)[:n])
    failing = engine.submit(a, dead_end(), max_tokens=N_TOKENS, n_draft=n_draft)
    other = engine.submit(b, sampling(), max_tokens=N_TOKENS, n_draft=n_draft)
    answer, good = finish(engine, [failing, other])
    assert answer.finish_reason == "error"
    assert answer.error
    assert answer.tokens == letters[: len(answer.tokens)]
    assert good.tokens == expected
    if n_draft:
        assert_in_step(engine)
    assert ask(engine, a + letters, max_tokens=3).tokens == ask(Engine(target), a + letters, max_tokens=3).tokens


def test_usage_counts_emitted_tokens_after_a_failure(opened: Opened) -> None:
    """Tokens that the failing round sampled were never emitted."""
    _, target = opened
    a = target.tokenize(PROMPT)
    letters = ask(Engine(target), a, sampling(grammar=FINITE), max_tokens=N_TOKENS).tokens
    engine = drafting_engine(target, lambda s, t, n: (perfect(a + letters[:-1])(s, t, n) + [9] * n)[:n])
    answer = ask(engine, a, dead_end(), max_tokens=N_TOKENS)
    assert answer.finish_reason == "error"
    assert answer.final.n_generated == len(answer.tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": -0.5}, "top_p = -0.5"),
        ({"min_p": float("inf")}, "min_p = inf"),
        ({"repeat_penalty": 0.0}, "repeat_penalty = 0"),
        ({"repeat_last_n": -2}, "repeat_last_n = -2.*, expected -1 or more"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n = -2.*, expected -1 or more"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty = nan"),
        ({"logit_bias": [(384, 1.0)]}, "logit_bias token = 384"),
        ({"logit_bias": [(-1, 1.0)]}, "logit_bias token = -1"),
        ({"logit_bias": [(1, float("nan"))]}, "logit_bias = nan"),
        ({"grammar": "root ::= ("}, "grammar is not valid GBNF"),
        ({"grammar": 'other ::= "a"'}, "no rule 'root'"),
        ({"grammar": "root ::= missing"}, "grammar is not valid GBNF"),
    ],
)
def test_refused_sampling(opened: Opened, options: dict[str, Any], message: str) -> None:
    engine = Engine(opened[1])
    with pytest.raises(ValueError, match=message):
        engine.submit([1], sampling(**options))
    assert not engine.has_work()
    assert len(ask(engine, [1], max_tokens=2).tokens) == 2
