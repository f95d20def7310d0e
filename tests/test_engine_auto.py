"""The engine with automatic draft length: the target's own answers, whatever the policy chooses, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import DrafterFactory, TargetFactory
from engine_rig import (
    MAX_DRAFT,
    PROMPT,
    Script,
    ask,
    assert_in_step,
    check_stats,
    finish,
    first_right,
    guessing,
    open_target,
    perfect,
    sampling,
    scripted,
    scripts,
)
from tiny_models import ARCHITECTURES

from dspine_local._native import Drafter, DraftLengthPolicy, Engine, Forecast, RoundRecord, Target
from dspine_local.convert import convert_checkpoint

pytestmark = pytest.mark.native

Costs = list[tuple[int, float]]
# Microseconds that make every draft worth while, and none. The engine corrects them while it runs.
CHEAP: Costs = [(1, 50_000.0), (MAX_DRAFT + 1, 50_100.0)]
DEAR: Costs = [(n, 50_000.0 * n) for n in range(1, MAX_DRAFT + 2)]
DRAFT: Costs = [(1, 10.0), (MAX_DRAFT, 20.0)]


def auto(target: Target, script: Script, verify: Costs = CHEAP, **options: Any) -> Engine:
    drafter = scripted(script, n_seq=target.n_seq)
    return Engine(target, drafter, n_draft=None, verify_costs=verify, draft_costs=DRAFT, **options)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_answers_of_plain_decoding(tiny_target: TargetFactory, arch: str) -> None:
    """Two at once, greedy and sampled, behind good and bad drafters, with cheap and dear verification."""
    tiny = tiny_target(arch, "q8_0")
    target = open_target(tiny, n_seq=2, n_ctx=1024)
    prompts = [target.tokenize(PROMPT), target.tokenize(PROMPT[4:])]
    for params in (sampling(), sampling(temperature=0.8, seed=3)):
        plain = [ask(Engine(target), p, params, max_tokens=50, cache_prompt=False).tokens for p in prompts]
        known = [p + answer for p, answer in zip(prompts, plain, strict=True)]
        for name, script in scripts(target.n_vocab, *known).items():
            for verify in (CHEAP, DEAR):
                engine = auto(target, script, verify)
                ids = [engine.submit(p, params, max_tokens=50, cache_prompt=False) for p in prompts]
                answers = finish(engine, ids)
                assert [a.tokens for a in answers] == plain, name
                assert_in_step(engine)
                for answer in answers:
                    check_stats(answer)
                    assert sum(answer.final.rounds_by_draft) == answer.final.n_rounds


def test_it_drafts_where_that_pays_and_stops_where_not(tiny_target: TargetFactory) -> None:
    target = open_target(tiny_target("llama", "q8_0"))
    prompt = target.tokenize(PROMPT)
    known = prompt + ask(Engine(target), prompt, max_tokens=120).tokens
    right = ask(auto(target, perfect(known)), prompt, max_tokens=120).final
    assert right.n_accepted > 60
    wrong = ask(auto(target, first_right(0, target.n_vocab, known), DEAR), prompt, max_tokens=120).final
    assert wrong.rounds_by_draft[0] > 100


def test_features_that_wait_are_read_as_those_read_at_once(
    tiny_target: TargetFactory, tiny_drafter: DrafterFactory, tmp_path: Path
) -> None:
    tiny = tiny_target("llama", "q8_0")
    file = tmp_path / "drafter.gguf"
    convert_checkpoint(tiny_drafter(tiny), file, target=tiny.path)
    target = open_target(tiny)
    prompt = target.tokenize(PROMPT)

    def drafter_state(**options: Any) -> tuple[int, npt.NDArray[np.float16]]:
        """Rounds that waited for nothing, and the drafter's keys and values behind 40 tokens."""
        engine = Engine(target, Drafter(str(file), target.tensors(), n_ctx=512, n_threads=1), **options)
        stats = ask(engine, prompt, max_tokens=40, cache_prompt=False).final
        state = engine.save_slot(0).drafter
        return stats.rounds_by_draft[0], np.frombuffer(state[len(state) % 2 :], dtype=np.float16)

    n_waited, late = drafter_state(n_draft=None, verify_costs=DEAR, draft_costs=DRAFT)
    _, at_once = drafter_state(n_draft=2)
    assert n_waited > 20
    assert late.shape == at_once.shape
    assert np.linalg.norm(late.astype(float) - at_once) < 1e-3 * np.linalg.norm(at_once.astype(float))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_slot_is_cut_back_behind_what_waits(tiny_target: TargetFactory, arch: str) -> None:
    """The second prompt shares a beginning that ends among tokens whose features the drafter has not read."""
    target = open_target(tiny_target(arch, "q8_0"))
    prompt = target.tokenize(PROMPT)
    answer = ask(Engine(target), prompt, max_tokens=40).tokens
    again = prompt + answer[:20] + [answer[20] ^ 1]
    expected = ask(Engine(target), again, max_tokens=20, cache_prompt=False).tokens
    engine = auto(target, first_right(0, target.n_vocab, prompt + answer), DEAR)
    assert ask(engine, prompt, max_tokens=40).tokens == answer
    assert_in_step(engine)
    assert ask(engine, again, max_tokens=20).tokens == expected
    assert_in_step(engine)


def replayed(records: list[RoundRecord], verify: Costs, *, apart: bool = False) -> list[tuple[int, bool, list[int]]]:
    """What a new policy decides when it is told the same."""
    policy = DraftLengthPolicy(verify, DRAFT, apart=apart)
    forecasts: dict[int, Forecast] = {}
    decisions = []
    for record in records:
        slots = [(forecasts.setdefault(s.request, Forecast()), s.limit) for s in record.slots]
        able = [slot for slot in slots if slot[1] > 0]
        usable = [s.lengths for s in record.slots if s.limit > 0]
        plan = policy.plan(able, n_other=record.n_other, lengths=usable)
        lengths = [0] * len(slots)
        if plan.n_draft:
            probabilities = [s.probabilities for s in record.slots if s.limit > 0]
            cut = iter(policy.cut(plan, able, probabilities, n_other=record.n_other, lengths=usable))
            lengths = [next(cut) if s.limit > 0 else 0 for s in record.slots]
        for (forecast, _), slot in zip(slots, record.slots, strict=True):
            if slot.probabilities:
                policy.observe_draft(forecast, slot.probabilities, slot.n_agreed, ended=slot.ended)
        if record.n_rows:
            policy.observe_round(
                plan,
                n_rows=record.n_rows,
                n_columns=record.n_columns,
                verify_us=record.verify_us,
                draft_us=record.draft_us,
                rest_us=record.rest_us,
                n_emitted=record.n_emitted,
                decodes=record.decodes,
            )
        decisions.append((plan.n_draft, plan.probe, lengths))
    return decisions


@pytest.mark.parametrize("exact", [None, [[(0, 2000)], [], [(0, 2000)], [(60, 100)]]])
def test_recorded_rounds_replay_every_decision(
    tiny_target: TargetFactory, exact: list[list[tuple[int, int]]] | None
) -> None:
    """Nothing but what is recorded goes into a decision: no clock, no chance."""
    target = open_target(tiny_target("llama", "q8_0"), n_seq=2, n_ctx=1024)
    prompts = [target.tokenize(PROMPT), target.tokenize(PROMPT[4:])]
    known = [p + ask(Engine(target), p, max_tokens=80, cache_prompt=False).tokens for p in prompts]
    engine = auto(target, guessing(3, target.n_vocab, *known), exact=exact)
    engine.record_rounds(1000)
    finish(engine, [engine.submit(p, sampling(), max_tokens=80, cache_prompt=False) for p in prompts])
    records = engine.take_rounds()
    assert len(records) > 20
    made = [(r.plan.n_draft, r.plan.probe, [s.n_verified for s in r.slots]) for r in records]
    assert replayed(records, CHEAP, apart=exact is not None) == made
    if exact is not None:
        assert {0, 1, 3} <= {n for _, _, lengths in made for n in lengths} <= {0, 1, 3, 4}
    assert engine.take_rounds() == []


@pytest.mark.parametrize("count", [0, 3])
def test_only_the_last_rounds_are_kept(tiny_target: TargetFactory, count: int) -> None:
    target = open_target(tiny_target("llama", "q8_0"))
    prompt = target.tokenize(PROMPT)
    engine = auto(target, lambda _seq, _tokens, _n: [])
    engine.record_rounds(count)
    ask(engine, prompt, max_tokens=20)
    assert len(engine.take_rounds()) == count


def test_costs_belong_to_the_automatic_length(tiny_target: TargetFactory) -> None:
    target = open_target(tiny_target("llama", "q8_0"))
    script: Callable[..., list[int]] = lambda _seq, _tokens, _n: []  # noqa: E731
    assert Engine(target, scripted(script), n_draft=3).costs is None
    costs = auto(target, script).costs
    assert costs is not None
    assert costs[0][0] == (1, pytest.approx(50_000.0))
    with pytest.raises(ValueError, match="cost"):
        Engine(target, scripted(script), n_draft=None)
