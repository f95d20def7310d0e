"""Several slots at once, cancelled requests, and threads: every request gets what it gets alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import DrafterFactory, TargetFactory
from engine_rig import (
    MAX_DRAFT,
    PROMPT,
    Answer,
    ask,
    assert_in_step,
    check_stats,
    drafting_engine,
    finish,
    guessing,
    open_target,
    perfect,
    sampling,
    step_into,
)
from tiny_models import TinyTarget

from dspine_local._native import Drafter, Engine, Target
from dspine_local.convert import convert_checkpoint

pytestmark = pytest.mark.native

N_TOKENS = 40
N_BATCH = 64
Opened = tuple[TinyTarget, Target]


@pytest.fixture(scope="module")
def four(tiny_target: TargetFactory) -> Opened:
    """Four slots, and a batch that a long prompt fills."""
    tiny = tiny_target("llama", "q8_0")
    return tiny, open_target(tiny, n_ctx=1024, n_seq=4, n_batch=N_BATCH)


@pytest.fixture(scope="module")
def prompts(four: Opened) -> list[list[int]]:
    texts = [PROMPT, "Once upon a time", PROMPT * 3, "1 + 1 =", "A", "def f(x): return", "x" * 80, "Dear all,"]
    return [four[1].tokenize(text) for text in texts]


@pytest.fixture(scope="module")
def alone(four: Opened, prompts: list[list[int]]) -> list[list[int]]:
    """What each prompt gets from plain decoding on its own."""
    engine = Engine(four[1])
    return [ask(engine, p, max_tokens=N_TOKENS, cache_prompt=False).tokens for p in prompts]


@pytest.fixture(scope="module")
def known(prompts: list[list[int]], alone: list[list[int]]) -> list[list[int]]:
    return [p + a for p, a in zip(prompts, alone, strict=True)]


@pytest.mark.parametrize("n_draft", [0, 1, 5, MAX_DRAFT])
def test_slots_do_not_touch_each_other(
    four: Opened, prompts: list[list[int]], alone: list[list[int]], known: list[list[int]], n_draft: int
) -> None:
    """Eight requests on four slots, started one by one: reading and writing share batches."""
    tiny, target = four
    engine = drafting_engine(target, guessing(1, tiny.n_vocab, *known))
    answers: dict[int, Answer] = {}
    ids: list[int] = []
    while engine.has_work() or len(ids) < len(prompts):
        if len(ids) < len(prompts):
            ids.append(engine.submit(prompts[len(ids)], sampling(), max_tokens=N_TOKENS, n_draft=n_draft))
        step_into(engine, answers)
    assert [answers[i].tokens for i in ids] == alone
    for answer in answers.values():
        check_stats(answer)
    if n_draft:
        assert_in_step(engine)


def test_every_slot_has_its_own_length_and_sampler(
    four: Opened, prompts: list[list[int]], alone: list[list[int]], known: list[list[int]]
) -> None:
    tiny, target = four
    hot = [sampling(temperature=1.0, seed=s, repeat_penalty=1.2) for s in range(4)]
    plain = Engine(target)
    expected = [ask(plain, prompts[i], hot[i], max_tokens=N_TOKENS, cache_prompt=False).tokens for i in range(4)]
    sampled = [prompts[i] + expected[i] for i in range(4)]
    engine = drafting_engine(target, guessing(2, tiny.n_vocab, *sampled, *known))
    ids = [engine.submit(prompts[i], hot[i], max_tokens=N_TOKENS, n_draft=(0, 3, 15, 8)[i]) for i in range(4)]
    ids += [engine.submit(prompts[i], sampling(), max_tokens=N_TOKENS, n_draft=i) for i in range(4, 8)]
    assert [a.tokens for a in finish(engine, ids)] == expected + alone[4:]


@pytest.mark.parametrize("window", [None, 24])
def test_a_real_drafter_on_four_slots(
    four: Opened,
    prompts: list[list[int]],
    alone: list[list[int]],
    tiny_drafter: DrafterFactory,
    tmp_path: Path,
    window: int | None,
) -> None:
    """Tokens as alone, and the same drafts as alone."""
    tiny, target = four
    gguf = tmp_path / "drafter.gguf"
    convert_checkpoint(tiny_drafter(tiny, sliding_window=window), gguf, outtype="f32")
    drafter = Drafter(str(gguf), target.tensors(), n_seq=4, n_ctx=256, n_threads=1)
    engine = drafting_engine(target, drafter, 7)
    single = [ask(engine, p, max_tokens=N_TOKENS, cache_prompt=False) for p in prompts]
    together = finish(engine, [engine.submit(p, sampling(), max_tokens=N_TOKENS) for p in prompts])
    assert [a.tokens for a in single] == [a.tokens for a in together] == alone
    assert [list(a.final.accepted_at) for a in single] == [list(a.final.accepted_at) for a in together]
    assert_in_step(engine)


def test_the_slot_with_the_longest_prefix_is_taken(four: Opened, prompts: list[list[int]]) -> None:
    _, target = four
    engine = drafting_engine(target, lambda _s, _t, n: [1] * n, 3)
    first = finish(engine, [engine.submit(p, sampling(), max_tokens=8) for p in prompts[:4]])
    histories = [p + a.tokens for p, a in zip(prompts, first, strict=False)]
    for history in reversed(histories):
        answer = ask(engine, [*history, 7, 8], max_tokens=2)
        assert answer.final.n_reused == len(history) - 1


@pytest.mark.parametrize("phase", ["queued", "prefill", "generating"])
def test_cancel(
    four: Opened, prompts: list[list[int]], alone: list[list[int]], known: list[list[int]], phase: str
) -> None:
    """Over with the next step, the slot is free again, and the others notice nothing."""
    tiny, target = four
    engine = drafting_engine(target, guessing(3, tiny.n_vocab, *known), 7)
    answers: dict[int, Answer] = {}
    others = [engine.submit(prompts[i], sampling(), max_tokens=N_TOKENS) for i in (0, 1, 3)]
    long_prompt = (prompts[2] * 3)[:200]
    victim = engine.submit(long_prompt, sampling())
    if phase == "queued":  # behind the four that have slots
        others.append(victim)
        victim = engine.submit(prompts[4], sampling())
    step_into(engine, answers)
    while phase == "generating" and victim not in answers:
        step_into(engine, answers)
    assert (victim in answers) is (phase == "generating")
    assert engine.cancel(victim)
    assert engine.has_work()
    step_into(engine, answers)
    assert answers[victim].finish_reason == "cancelled"
    assert not engine.cancel(victim)
    check_stats(answers[victim])
    assert_in_step(engine)
    if phase == "queued":
        assert engine.cancel(others.pop())
    late = [engine.submit(prompts[i], sampling(), max_tokens=N_TOKENS) for i in (4, 5)]
    while engine.has_work():
        step_into(engine, answers)
    assert [answers[i].tokens for i in others + late] == [alone[i] for i in (0, 1, 3, 4, 5)]
    # What was read before the end is still good.
    again = ask(engine, long_prompt, max_tokens=4)
    assert again.tokens == ask(Engine(target), long_prompt, max_tokens=4, cache_prompt=False).tokens


def test_unknown_requests_cannot_be_cancelled(four: Opened) -> None:
    engine = Engine(four[1])
    assert not engine.cancel(1)
    assert not engine.cancel(-5)
    assert engine.step() == []
    assert not engine.has_work()


def test_threads(four: Opened, prompts: list[list[int]], alone: list[list[int]], known: list[list[int]]) -> None:
    """Requests come and go from other threads while one steps."""
    tiny, target = four
    engine = drafting_engine(target, guessing(4, tiny.n_vocab, *known), 7)
    answers: dict[int, Answer] = {}
    kept: list[tuple[int, int]] = []
    cancelled: list[int] = []
    lock = threading.Lock()

    def submit(i: int) -> None:
        for _ in range(2):
            request = engine.submit(prompts[i], sampling(), max_tokens=N_TOKENS)
            with lock:
                kept.append((request, i))
            doomed = engine.submit(prompts[i], sampling(temperature=1.0))
            engine.cancel(doomed)
            with lock:
                cancelled.append(doomed)

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    while engine.has_work() or any(t.is_alive() for t in threads):
        step_into(engine, answers)
    for thread in threads:
        thread.join()
    while engine.has_work():
        step_into(engine, answers)
    assert len(kept) == len(cancelled) == 12
    assert all(answers[request].tokens == alone[i] for request, i in kept)
    assert all(answers[request].finish_reason == "cancelled" for request in cancelled)
    assert_in_step(engine)


def test_two_threads_cannot_step(four: Opened, prompts: list[list[int]]) -> None:
    _, target = four
    inside, proceed = threading.Event(), threading.Event()

    def script(_seq: int, _tokens: list[int], _n: int) -> list[int]:
        inside.set()
        assert proceed.wait(timeout=60)
        return []

    engine = drafting_engine(target, script, 7)
    request = engine.submit(prompts[0], sampling(), max_tokens=2)
    engine.step()
    answers: dict[int, Answer] = {}
    thread = threading.Thread(target=step_into, args=(engine, answers))
    engine.cancel(request)
    engine.step()
    request = engine.submit(prompts[0], sampling(), max_tokens=3)
    engine.step()
    thread.start()
    assert inside.wait(timeout=60)
    with pytest.raises(RuntimeError, match="stepped by another thread"):
        engine.step()
    assert engine.cancel(request)  # from another thread, in the middle of a round
    proceed.set()
    thread.join()
    finish(engine, [])
    assert not engine.has_work()


@pytest.mark.parametrize("window", [None, 16])
def test_a_shared_beginning_is_reused_whatever_the_drafter(
    four: Opened, tiny_drafter: DrafterFactory, tmp_path: Path, window: int | None
) -> None:
    """Many chats with one system prompt; with a drafter it is as reusable as without."""
    tiny, target = four
    system = (target.tokenize(PROMPT) * 6)[:150]
    first, second = [*system, 10, 11], [*system, 12, 13, 14]

    def reused(engine: Engine) -> int:
        ask(engine, first, max_tokens=90)
        answer = ask(engine, second, max_tokens=4)
        assert answer.finish_reason == "length"
        return answer.final.n_reused

    gguf = tmp_path / "drafter.gguf"
    convert_checkpoint(tiny_drafter(tiny, sliding_window=window), gguf, outtype="f32")
    drafter = Drafter(str(gguf), target.tensors(), n_seq=4, n_ctx=256, n_threads=1)
    expected = reused(Engine(target))
    assert expected == 150
    # A ring has forgotten the window before the shared end: that much is read once more.
    lost = 0 if window is None else window - 1
    assert reused(drafting_engine(target, drafter, 7)) == expected - lost


def test_refused_requests(four: Opened) -> None:
    tiny, target = four
    engine = drafting_engine(target, perfect(), 7)
    refused: list[tuple[list[int], dict[str, Any], str]] = [
        ([], {}, "the prompt has no tokens"),
        ([1, -1], {}, "token -1 is outside the vocabulary of 384"),
        ([tiny.n_vocab], {}, "token 384 is outside the vocabulary of 384"),
        ([1], {"max_tokens": -2}, "max_tokens = -2, expected -1 or more"),
        ([1], {"n_draft": 16}, "n_draft = 16, expected 0 to 15"),
        ([1], {"n_draft": -2}, "n_draft = -2, expected 0 to 15"),
    ]
    for tokens, options, message in refused:
        with pytest.raises(ValueError, match=message):
            engine.submit(tokens, sampling(), **options)
    assert not engine.has_work()
    with pytest.raises(ValueError, match="no slot 4, the engine has 4"):
        engine.lengths(4)
    with pytest.raises(ValueError, match="no slot -1, the engine has 4"):
        engine.lengths(-1)
