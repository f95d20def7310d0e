"""Acceptance profiles, and the drafter that follows them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from conftest import TargetFactory
from engine_rig import MAX_DRAFT, PROMPT, ask, drafting_engine, open_target, scripted

from dspine_local._native import Engine, SimulatedDrafter
from dspine_local.bench.profile import PUBLISHED, AcceptanceProfile, constant_acceptance, load_profile
from dspine_local.bench.simulation import SimulatedEngine
from dspine_local.errors import ModelFormatError
from dspine_local.options import GREEDY, EngineOptions


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_profiles_have_the_published_mean(name: str) -> None:
    mean, block_size = PUBLISHED[name]
    profile = load_profile(name)
    assert len(profile.acceptance) == block_size - 1
    assert profile.mean_emitted(block_size - 1) == pytest.approx(mean, abs=1e-9)
    assert profile.mean_emitted(1) == 1 + profile.acceptance[0]


@pytest.mark.parametrize(("mean", "probability"), [(1.0, 0.0), (16.0, 1.0), (1.5, 1 / 3)])
def test_constant_probability(mean: float, probability: float) -> None:
    found = constant_acceptance(mean, 16)
    assert found == pytest.approx((probability,) * 15, abs=1e-6)


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_profiles_from_files(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path / "mine.json", {"acceptance": [0.9, 0.5, 0], "source": "eval"}))
    assert profile == AcceptanceProfile("mine", "eval", (0.9, 0.5, 0.0))
    assert profile.mean_emitted(2) == profile.mean_emitted(15) == pytest.approx(1 + 0.9 + 0.45)
    mean = load_profile(write(tmp_path / "mean.json", {"name": "half", "mean_emitted": 2, "block_size": 4}))
    assert mean.name == "half"
    assert mean.mean_emitted(3) == pytest.approx(2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([0.5], "expected a JSON object"),
        ({}, "expected either acceptance, or mean_emitted and block_size"),
        ({"acceptance": [0.5], "block_size": 4}, "expected either"),
        ({"mean_emitted": 2}, "expected either"),
        ({"acceptance": [], "name": "x"}, "at least one probability"),
        ({"acceptance": [1.5]}, "a number from 0 to 1"),
        ({"acceptance": 0.5}, "a list of probabilities"),
        ({"acceptance": [0.5], "tokens": 1}, "key = 'tokens', expected one of name"),
        ({"acceptance": [0.5], "name": 1}, "name = 1, expected text"),
        ({"mean_emitted": 5, "block_size": 4}, "a number from 1 to 4"),
        ({"mean_emitted": 1, "block_size": 1}, "an integer from 2"),
    ],
)
def test_wrong_profiles_are_named(tmp_path: Path, content: Any, message: str) -> None:
    path = write(tmp_path / "wrong.json", content)
    with pytest.raises(ModelFormatError, match=message) as error:
        load_profile(path)
    assert "wrong.json" in str(error.value)


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(FileNotFoundError, match=r"no such file: 'qwen9' .*qwen3-8b"):
        load_profile("qwen9")


def simulate(tiny_target: TargetFactory, acceptance: list[float], n_draft: int, *, n: int, seed: int = 1) -> list[Any]:
    """Answers of n tokens to three prompts, drafted at a certain acceptance: pairs of the known and the given one."""
    target = open_target(tiny_target("llama", "q8_0"))
    drafter = SimulatedDrafter(
        scripted(lambda _seq, _tokens, k: [0] * k), acceptance, seed=seed, n_vocab=target.n_vocab
    )
    pairs = []
    for prompt in (PROMPT, "one two three", "A"):
        tokens = target.tokenize(prompt)
        plain = ask(Engine(target, None), tokens, max_tokens=n)
        drafter.expect(tokens, plain.tokens)
        engine = drafting_engine(target, drafter, n_draft)
        pairs.append((plain, ask(engine, tokens, max_tokens=n)))
    return pairs


@pytest.mark.parametrize("n_draft", [3, MAX_DRAFT])
def test_simulated_acceptance_is_that_of_the_profile(tiny_target: TargetFactory, n_draft: int) -> None:
    acceptance = [0.9, 0.6, 0.9, *[0.8] * 12]
    pairs = simulate(tiny_target, acceptance, n_draft, n=400)
    assert all(plain.tokens == drafted.tokens for plain, drafted in pairs)
    stats = [drafted.final for _, drafted in pairs]
    n_rounds = sum(s.n_rounds for s in stats)
    reach = [math.prod(acceptance[: i + 1]) for i in range(n_draft)]
    variance = sum((2 * i + 1) * p for i, p in enumerate(reach)) - sum(reach) ** 2
    error = 3 * math.sqrt(variance / n_rounds)
    assert sum(s.n_accepted for s in stats) / n_rounds == pytest.approx(sum(reach), abs=error)
    first = sum(s.accepted_at[0] for s in stats) / sum(s.drafted_at[0] for s in stats)
    assert first == pytest.approx(0.9, abs=3 * math.sqrt(0.09 / n_rounds))


def decided(steps: list[list[int]], n_draft: int) -> dict[int, bool]:
    """By position in the answer: whether a drafted token there was right, as far as rounds have shown."""
    found = {}
    position = len(steps[0])  # from the prompt
    for step in steps[1:-1]:
        n_accepted = len(step) - 1
        found |= dict.fromkeys(range(position, position + n_accepted), True)
        if n_accepted < n_draft:
            found[position + n_accepted] = False
        position += len(step)
    return found


def test_what_is_right_follows_from_seed_and_position_not_from_the_draft_length(tiny_target: TargetFactory) -> None:
    short, long, other = (
        [decided(drafted.steps, k) for _, drafted in simulate(tiny_target, [0.5] * 15, k, n=150, seed=seed)]
        for k, seed in ((2, 1), (15, 1), (15, 2))
    )
    for a, b in zip(short, long, strict=True):
        both = a.keys() & b.keys()
        assert len(both) > 50
        assert all(a[position] == b[position] for position in both)
    assert short[0] != short[1]  # prompts draw differently
    assert long != other


def test_a_sure_drafter_and_a_hopeless_one(tiny_target: TargetFactory) -> None:
    for acceptance, n_accepted in (([1.0] * 15, 15), ([0.0], 0), ([1.0] * 2, 2)):
        for plain, drafted in simulate(tiny_target, acceptance, MAX_DRAFT, n=50):
            assert drafted.tokens == plain.tokens
            assert {len(step) - 1 for step in drafted.steps[1:-2]} == {n_accepted}


def test_the_automatic_length_goes_by_the_profile(tiny_target: TargetFactory) -> None:
    """What is never accepted is never verified, from the first round on: the drafter itself says so."""
    target = open_target(tiny_target("llama", "q8_0"))
    drafter = SimulatedDrafter(scripted(lambda _seq, _tokens, k: [0] * k), [1.0] * 3, seed=1, n_vocab=target.n_vocab)
    tokens = target.tokenize(PROMPT)
    drafter.expect(tokens, ask(Engine(target, None), tokens, max_tokens=60).tokens)
    costs = {"verify_costs": [(1, 1000.0), (16, 1100.0)], "draft_costs": [(1, 100.0), (15, 101.0)]}
    stats = ask(Engine(target, drafter, n_draft=None, **costs), tokens, max_tokens=60).final
    assert stats.n_accepted == stats.n_drafted > 30
    assert len(stats.drafted_at) == 3


@pytest.mark.parametrize(
    ("acceptance", "n_vocab", "message"),
    [([], 10, "at least one"), ([1.5], 10, "from 0 to 1"), ([float("nan")], 10, "from 0 to 1"), ([0.5], 1, "two")],
)
def test_wrong_arguments_of_the_simulated_drafter(acceptance: list[float], n_vocab: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulatedDrafter(scripted(lambda *_: []), acceptance, seed=1, n_vocab=n_vocab)


def test_the_simulated_engine_needs_no_luck(tiny_pair: tuple[Path, Path]) -> None:
    profile = AcceptanceProfile("sure", "test", (1.0,) * 15)
    engine = SimulatedEngine(*tiny_pair, EngineOptions(n_ctx=512, n_threads=1), profile, seed=1)
    tokens = engine.tokenizer.encode(PROMPT)
    engine.learn(tokens, 49)
    plain = engine.generate(tokens, n_draft=0, max_tokens=49, sampling=GREEDY)
    plain.read()
    drafted = engine.generate(PROMPT, n_draft=15, max_tokens=49, sampling=GREEDY)
    drafted.read()
    assert drafted.tokens == plain.tokens
    assert drafted.stats is not None
    assert drafted.stats.rounds == 3
    unknown = engine.generate("another prompt", n_draft=3, max_tokens=12, sampling=GREEDY)
    unknown.read()
    assert unknown.stats is not None
    assert unknown.stats.acceptance_length is not None
    assert unknown.stats.acceptance_length < 3


def test_a_simulated_request_stays_on_its_answer(tiny_pair: tuple[Path, Path]) -> None:
    """Where the target would have said something else, its tokens are replaced, and counted."""
    engine = SimulatedEngine(*tiny_pair, EngineOptions(n_ctx=256), load_profile("qwen3-8b"), seed=1)
    prompt = engine.tokenizer.encode("Once upon a time")
    engine.learn(prompt, 20)
    assert engine.n_replaced == 0
    answer = engine.generate(prompt, n_draft=3, max_tokens=20, sampling=GREEDY)
    answer.read()
    assert engine.n_replaced == 0
    other = [(token + 1) % engine.target.n_vocab if i in (4, 9) else token for i, token in enumerate(answer.tokens)]
    engine._answers[tuple(prompt)] = other
    for n_draft in (0, 3):
        before = engine.n_replaced
        forced = engine.generate(prompt, n_draft=n_draft, max_tokens=20, sampling=GREEDY)
        forced.read()
        assert forced.tokens == other[: len(forced.tokens)]
        assert engine.n_replaced - before >= 2
