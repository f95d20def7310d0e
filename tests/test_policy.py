"""The draft-length policy on made-up and recorded rounds: near the best fixed length, never behind plain decoding."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import mean

import pytest
from policy_rig import STAIRS, Draw, Trace, World, automatic, fixed

from dspine_local._native import DraftLengthPolicy, Forecast

N_ROUNDS = 1500
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 9, 11, 15)
# SmolLM2 in Q8_0 on two cores: milliseconds of a decode by tokens.
SMOLLM2 = {1: 13.4, 2: 18.2, 3: 21.8, 4: 24.6, 5: 31.2, 6: 34.2, 7: 37.4, 8: 37.5}
TRACE = Path(__file__).parent / "data" / "traces" / "smollm2.npz"


def beta(p: float) -> Draw:
    """Tokens of varying difficulty, which the drafter knows exactly."""

    def draw(rng: random.Random, _: int) -> tuple[float, float]:
        q = min(0.99, max(0.02, rng.betavariate(4 * p, 4 * (1 - p))))
        return q, q

    return draw


def misjudged(p: float, power: float) -> Draw:
    """A drafter that thinks too much (power < 1) or too little of itself."""
    true = beta(p)

    def draw(rng: random.Random, place: int) -> tuple[float, float]:
        _, q = true(rng, place)
        return min(0.99, q**power), q

    return draw


def blind(p: float) -> Draw:
    """A drafter that always says the same."""
    return lambda _rng, _place: (0.5, p)


def alternating(_rng: random.Random, place: int) -> tuple[float, float]:
    """Every second token is wrong, and the drafter does not know which: no draft is longer than one."""
    return 0.5, float(place % 2)


def drifting(_rng: random.Random, place: int) -> tuple[float, float]:
    """Good for a thousand tokens, useless for the next thousand, and as sure of itself."""
    return (0.8, 0.85 if place // 1000 % 2 == 0 else 0.05)


DRAFTERS: dict[str, Draw] = {
    "good": beta(0.8),
    "fair": beta(0.5),
    "poor": beta(0.2),
    "boastful": misjudged(0.6, 0.5),
    "modest": misjudged(0.6, 2.0),
    "blind": blind(0.7),
    "always wrong": blind(0.0),
    "sure and wrong": lambda _rng, _place: (0.99, 0.0),
    "alternating": alternating,
    "drifting": drifting,
}


@pytest.mark.parametrize("stairs", STAIRS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_near_the_best_fixed_length_and_never_behind_plain_decoding(stairs: str, drafter: str) -> None:
    def world(seed: int) -> World:
        return World(STAIRS[stairs], DRAFTERS[drafter], seed=seed)

    to_best, to_plain = [], []
    for seed in range(2):
        rates = {n: fixed(world(seed), n, N_ROUNDS).rate for n in LENGTHS}
        rate = automatic(world(seed), N_ROUNDS).rate
        to_best.append(rate / max(rates.values()))
        to_plain.append(rate / rates[0])
    assert mean(to_plain) > 0.98
    assert mean(to_best) > 0.95


@pytest.mark.parametrize("slope", [0.0, 0.05, 0.1, None])
def test_on_recorded_drafts(slope: float | None) -> None:
    """What a real drafter drafted, with the target's measured costs and with cheaper ones."""
    trace = Trace(TRACE)
    stairs = SMOLLM2 if slope is None else {n: 12.0 * (1 + slope * (n - 1)) for n in range(1, 9)}

    def world(seed: int = 1) -> World:
        return World(stairs, trace=trace, draft_base=2.9, draft_token=0.6, seed=seed)

    rates = {n: fixed(world(), n, N_ROUNDS).rate for n in range(trace.max_draft + 1)}
    rate = mean(automatic(world(seed), N_ROUNDS, max_draft=trace.max_draft).rate for seed in range(3))
    assert rate > 0.98 * rates[0]
    assert rate > 0.97 * max(rates.values())


def test_a_drafter_that_gets_good_is_noticed() -> None:
    """Probes cost little, and find out."""
    draw: Draw = lambda _rng, place: (0.5, 0.0 if place < 4000 else 0.9)  # noqa: E731
    world = World(STAIRS["cliff"], draw)
    policy = world.policy()
    bad = automatic(world, 4000, policy=policy)
    assert mean(bad.lengths) < 0.1
    automatic(world, 1000, policy=policy)
    good = automatic(world, 400, policy=policy)
    assert mean(good.lengths) > 2.5


def test_costs_that_were_measured_under_load_are_corrected() -> None:
    """At load everything seemed to cost the same; in truth every row costs as much as the first."""
    world = World(STAIRS["linear"], beta(0.6))
    policy = DraftLengthPolicy([(1, 9000.0), (16, 9500.0)], [(1, 400.0), (15, 900.0)])
    automatic(world, 600, policy=policy)
    later = automatic(world, 600, policy=policy)
    assert mean(later.lengths) < 0.2


def test_a_slower_machine_changes_no_choice() -> None:
    """All costs grow by half: what is best stays best."""
    usual = automatic(World(STAIRS["cliff"], beta(0.8)), N_ROUNDS)
    slow = World(STAIRS["cliff"], beta(0.8), drift=1.5)
    slow.draft_base, slow.draft_token = 0.6, 0.045
    assert abs(mean(automatic(slow, N_ROUNDS).lengths) - mean(usual.lengths)) < 0.3


def test_replaying_gives_the_same_choices() -> None:
    world = [World(STAIRS["bf16"], beta(0.8), seed=3) for _ in range(2)]
    assert automatic(world[0], 400).lengths == automatic(world[1], 400).lengths


def test_slots_share_the_batch_by_what_their_tokens_are_worth() -> None:
    """Of two drafts the better one gets the rows; more slots make a row more expensive."""
    policy = DraftLengthPolicy([(1, 1000.0), (4, 1100.0), (5, 4000.0), (32, 16000.0)], [(1, 50.0), (30, 80.0)])
    good, bad = Forecast(), Forecast()
    for _ in range(40):
        policy.observe_draft(good, [0.9] * 3, 3, ended=False)
        policy.observe_draft(bad, [0.1] * 3, 0, ended=True)
    slots = [(good, 3), (bad, 3)]
    plan = policy.plan(slots)
    assert plan.n_draft >= 2
    lengths = policy.cut(plan, slots, [[0.9] * plan.n_draft, [0.1] * plan.n_draft])
    assert lengths[0] == 2  # the four rows that are nearly free hold two tokens of their own
    assert lengths[1] == 0


def test_rows_of_others_count() -> None:
    """Behind three rows of fixed slots the next one is on the expensive step."""
    policy = DraftLengthPolicy([(1, 1000.0), (4, 1100.0), (5, 6000.0), (16, 7000.0)], [(1, 20.0), (15, 40.0)])
    assert policy.plan([(Forecast(), 3)]).n_draft == 3
    assert DraftLengthPolicy(policy.verify_costs, policy.draft_costs).plan([(Forecast(), 3)], n_other=3).n_draft == 0


@pytest.mark.parametrize("drafter", ["good", "fair", "boastful", "always wrong", "drifting"])
def test_a_slot_alone_is_planned_alike_together_and_apart(drafter: str) -> None:
    """Where drafting pays: apart, a draft of which nothing is verified is an outcome that is thought of."""
    together, apart = (World(STAIRS["flat"], DRAFTERS[drafter], seed=5) for _ in range(2))
    expected = automatic(together, 800, policy=together.policy())
    assert automatic(apart, 800, policy=apart.policy(apart=True)).lengths == expected.lengths


@pytest.mark.parametrize("exact", [(1,), (2, 3), (4, 9), (1, 2, 7, 15), (15,)])
@pytest.mark.parametrize("stairs", ["flat", "q8_0", "cliff", "linear"])
@pytest.mark.parametrize("drafter", ["good", "fair", "blind", "always wrong"])
def test_strict_uses_these_lengths_and_the_best_of_them(exact: tuple[int, ...], stairs: str, drafter: str) -> None:
    def world(seed: int) -> World:
        return World(STAIRS[stairs], DRAFTERS[drafter], seed=seed)

    to_best, to_plain = [], []
    for seed in range(2):
        rates = {n: fixed(world(seed), n, N_ROUNDS, exact=exact).rate for n in (0, *exact)}
        run = automatic(world(seed), N_ROUNDS, exact=exact)
        assert set(run.lengths) <= {0, *exact}
        to_best.append(run.rate / max(rates.values()))
        to_plain.append(run.rate / rates[0])
    assert mean(to_plain) > 0.98
    assert mean(to_best) > 0.95


def test_slots_apart_pay_for_their_own_decodes() -> None:
    """A row is as dear for the first slot's decode as for the second's: a good draft gets all, a bad one none."""
    policy = DraftLengthPolicy([(1, 1000.0), (4, 1100.0), (5, 4000.0)], [(1, 50.0), (30, 80.0)], apart=True)
    good, fair, bad = Forecast(), Forecast(), Forecast()
    for _ in range(40):
        policy.observe_draft(good, [0.9] * 3, 3, ended=False)
        policy.observe_draft(fair, [0.6] * 3, 2, ended=True)
        policy.observe_draft(bad, [0.02] * 3, 0, ended=True)
    slots, lengths = [(good, 3), (fair, 3), (bad, 3)], [[1, 3], [2], [1, 2, 3]]
    plan = policy.plan(slots, lengths=lengths)
    assert plan.n_draft == 3
    cut = policy.cut(plan, slots, [[0.9] * 3, [0.6] * 3, [0.001] * 3], lengths=lengths)
    assert cut == [3, 2, 0]


def test_lengths_belong_to_the_slots() -> None:
    policy = DraftLengthPolicy([(1, 1.0)], [(1, 1.0)], apart=True)
    with pytest.raises(ValueError, match="lengths of 2 slots for 1"):
        policy.plan([(Forecast(), 3)], lengths=[[1], [2]])


@pytest.mark.parametrize(
    ("verify", "draft"),
    [([], [(1, 1.0)]), ([(1, 1.0)], []), ([(2, 1.0), (1, 1.0)], [(1, 1.0)]), ([(1, -1.0)], [(1, 1.0)])],
)
def test_costs_that_make_no_sense_are_refused(verify: list[tuple[int, float]], draft: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="expected"):
        DraftLengthPolicy(verify, draft)
