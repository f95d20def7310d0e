"""Features that wait while nothing is drafted: read before the next draft, at the end, and whatever ends a request."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import DrafterFactory, TargetFactory
from engine_rig import PROMPT, Answer, ask, assert_in_step, finish, open_target, sampling, step_into

from dspine_local._native import Drafter, Engine, Target
from dspine_local.convert import convert_checkpoint

pytestmark = pytest.mark.native

N_TOKENS = 80  # more than the backlog holds
MAX_BACKLOG = 64
CHEAP, DEAR = [(1, 1.0), (64, 2.0)], [(1, 1e9), (64, 1e9)]
Opened = tuple[Target, Drafter]


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def opened(
    request: pytest.FixtureRequest,
    tiny_target: TargetFactory,
    tiny_drafter: DrafterFactory,
    tmp_path_factory: pytest.TempPathFactory,
) -> Opened:
    """A target with two slots, and a drafter with a sliding and a full layer."""
    tiny = tiny_target(request.param, "q8_0")
    target = open_target(tiny, n_ctx=1024, n_seq=2, n_batch=32)
    checkpoint = tiny_drafter(tiny, layer_types=["sliding_attention", "full_attention"], sliding_window=32, n_layers=2)
    gguf = tmp_path_factory.mktemp("backlog") / "drafter.gguf"
    convert_checkpoint(checkpoint, gguf, outtype="f32")
    return target, Drafter(str(gguf), target.tensors(), n_seq=2, n_ctx=512, n_threads=1)


def automatic(opened: Opened, draft_costs: list[tuple[int, float]]) -> Engine:
    """An engine whose drafts cost so much, or so little, that there are none, or always."""
    return Engine(*opened, n_draft=None, verify_costs=[(1, 1000.0), (64, 1001.0)], draft_costs=draft_costs)


def outcome(answer: Answer) -> tuple[Any, ...]:
    return answer.tokens, answer.final.n_reused, list(answer.final.drafted_at), list(answer.final.accepted_at)


def test_features_wait_and_are_read_in_time(opened: Opened) -> None:
    target, drafter = opened
    prompt = target.tokenize(PROMPT)
    engine = automatic(opened, DEAR)
    engine.submit(prompt, sampling(), max_tokens=N_TOKENS)
    waiting = []
    while engine.has_work():
        engine.step()
        assert_in_step(engine)
        waiting.append(engine.lengths(0)[1] - drafter.length(0))
    assert waiting[:4] == [0, 0, 1, 2] or waiting[:4] == [0, 1, 2, 3]  # one or two rounds for the prompt
    assert max(waiting) == MAX_BACKLOG
    assert waiting[-1] == 0
    assert engine.lengths(0) == (len(prompt) + N_TOKENS - 1,) * 2


def test_what_was_saved_behind_a_backlog_drafts_as_if_there_had_been_none(opened: Opened) -> None:
    """Plain decoding, then saved and restored: the next turn's drafts are those of an engine that always drafted."""
    target, drafter = opened
    prompt = target.tokenize(PROMPT)
    drafting = Engine(target, drafter, n_draft=7)
    first = ask(drafting, prompt, max_tokens=N_TOKENS)
    history = [*prompt, *first.tokens, *target.tokenize(" And then?")]
    expected = outcome(ask(drafting, history, max_tokens=30))
    assert expected[1] == len(prompt) + N_TOKENS - 1

    plain = automatic(opened, DEAR)
    answer = ask(plain, prompt, max_tokens=N_TOKENS)
    assert answer.tokens == first.tokens
    assert answer.final.n_drafted == 0
    state = plain.save_slot(0)
    assert len(state.tokens) == expected[1]
    restored = Engine(target, drafter, n_draft=7)
    restored.restore_slot(1, state)
    assert restored.lengths(1) == (expected[1], expected[1])
    assert outcome(ask(restored, history, max_tokens=30)) == expected


def test_a_draft_behind_a_backlog_is_that_of_a_fresh_cache(opened: Opened) -> None:
    """One slot waits while the other drafts; then it drafts too."""
    target, drafter = opened
    prompt = target.tokenize(PROMPT)
    fixed = Engine(target, drafter, n_draft=5)
    whole = ask(fixed, prompt, max_tokens=40, cache_prompt=False).tokens
    expected = ask(fixed, prompt + whole, max_tokens=20, cache_prompt=False)
    plain = automatic(opened, DEAR)
    ids = [
        plain.submit(prompt, sampling(), max_tokens=40),
        plain.submit(prompt, sampling(), max_tokens=40, n_draft=5),
    ]
    waited, drafted = finish(plain, ids)
    assert waited.tokens == drafted.tokens == whole
    assert (waited.final.n_drafted, drafted.final.n_drafted > 0) == (0, True)
    for slot in range(2):
        answer = ask(plain, prompt + whole, max_tokens=20, n_draft=5, slot=slot)
        assert answer.tokens == expected.tokens
        assert list(answer.final.accepted_at) == list(expected.final.accepted_at)
        assert answer.final.n_reused == len(prompt) + 39


@pytest.mark.parametrize("costs", [CHEAP, DEAR], ids=["drafting", "waiting"])
@pytest.mark.parametrize("phase", ["queued", "prefill", "first", "later"])
def test_cancel(opened: Opened, phase: str, costs: list[tuple[int, float]]) -> None:
    """Over with the next step, both caches as long as each other, and what was read is good for the next request."""
    target, _ = opened
    prompt = (target.tokenize(PROMPT) * 5)[:150]
    engine = automatic(opened, costs)
    answers: dict[int, Answer] = {}
    if phase == "queued":
        others = [engine.submit(prompt[:20], sampling(), max_tokens=60) for _ in range(2)]
        step_into(engine, answers)
    victim = engine.submit(prompt, sampling())
    step_into(engine, answers)
    if phase in ("first", "later"):
        while victim not in answers or len(answers[victim].tokens) < (1 if phase == "first" else 12):
            step_into(engine, answers)
        assert (answers[victim].final.n_drafted > 0) is (costs == CHEAP and phase == "later")
    assert engine.cancel(victim)
    step_into(engine, answers)
    assert answers[victim].finish_reason == "cancelled"
    assert_in_step(engine)
    assert [slot.request is None for slot in engine.slots()] == [phase != "queued"] * 2
    if phase == "queued":
        assert all(engine.cancel(other) for other in others)
        step_into(engine, answers)
    n_held = 0 if phase == "queued" else engine.lengths(0)[0]
    again = ask(engine, prompt + answers[victim].tokens + [5], max_tokens=12)
    assert again.final.n_reused >= min(n_held, len(prompt) + len(answers[victim].tokens))
    fresh = ask(Engine(target), prompt + answers[victim].tokens + [5], max_tokens=12, cache_prompt=False)
    assert again.tokens == fresh.tokens


def test_a_state_without_a_drafters_cache(opened: Opened) -> None:
    """Saved by an engine without a drafter: nothing of it is reused for a draft, and the answer is right."""
    target, drafter = opened
    prompt = target.tokenize(PROMPT)
    plain = Engine(target)
    first = ask(plain, prompt, max_tokens=20, cache_prompt=False)
    state = plain.save_slot(0)
    assert state.drafter == b""
    expected = ask(plain, prompt + first.tokens, max_tokens=20).tokens
    engine = Engine(target, drafter, n_draft=7)
    engine.restore_slot(0, state)
    answer = ask(engine, prompt + first.tokens, max_tokens=20)
    assert (answer.tokens, answer.final.n_reused) == (expected, 0)
