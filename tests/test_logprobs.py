"""Log-probabilities of accepted and sampled tokens: those of plain decoding."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import TargetFactory
from engine_rig import MAX_DRAFT, PROMPT, drafting_engine, open_target, sampling, scripts

from dspine_local._native import Engine, TokenLogprobs

pytestmark = pytest.mark.native

N_TOKENS, N_TOP = 40, 5


def collect(
    engine: Engine, tokens: list[int], n_probs: int, *, post_sampling: bool = False, **options: object
) -> tuple[list[int], list[TokenLogprobs]]:
    request = engine.submit(
        tokens,
        sampling(**options),
        max_tokens=N_TOKENS,
        n_probs=n_probs,
        post_sampling=post_sampling,
        cache_prompt=False,
    )
    emitted: list[int] = []
    logprobs: list[TokenLogprobs] = []
    while engine.has_work():
        for event in engine.step():
            assert event.id == request
            assert len(event.logprobs) == (len(event.tokens) if n_probs >= 0 else 0)
            emitted += event.tokens
            logprobs += event.logprobs
    return emitted, logprobs


def flat(logprobs: list[TokenLogprobs]) -> list[float]:
    return [value for entry in logprobs for value in (entry.logprob, *(p for _, p in entry.top))]


def test_plain_decoding_gives_the_softmax_of_its_logits(tiny_target: TargetFactory) -> None:
    target = open_target(tiny_target("llama", "q8_0"))
    prompt = target.tokenize(PROMPT)
    emitted, logprobs = collect(Engine(target), prompt, N_TOP)
    target.truncate(0, 0)
    for i, (token, entry) in enumerate(zip(emitted, logprobs, strict=True)):
        logits = target.decode(0, prompt if i == 0 else [emitted[i - 1]])[0].astype(np.float64)
        expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert entry.logprob == pytest.approx(expected[token], abs=1e-4)
        assert [t for t, _ in entry.top] == np.argsort(-logits, kind="stable")[:N_TOP].tolist()
        assert [p for _, p in entry.top] == pytest.approx(np.sort(expected)[::-1][:N_TOP], abs=1e-4)


@pytest.mark.parametrize("post_sampling", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "repeat_penalty": 1.3, "seed": 3}])
@pytest.mark.parametrize("kind", ["perfect", "wrong", "first_2", "random"])
def test_drafted_tokens_have_those_of_plain_decoding(
    tiny_target: TargetFactory, kind: str, options: dict[str, float], post_sampling: bool
) -> None:
    tiny = tiny_target("llama", "q8_0")
    target = open_target(tiny)
    prompt = target.tokenize(PROMPT)
    emitted, plain = collect(Engine(target), prompt, N_TOP, post_sampling=post_sampling, **options)
    engine = drafting_engine(target, scripts(tiny.n_vocab, prompt + emitted)[kind], MAX_DRAFT)
    drafted_tokens, drafted = collect(engine, prompt, N_TOP, post_sampling=post_sampling, **options)
    assert drafted_tokens == emitted
    assert [[t for t, _ in e.top] for e in drafted] == [[t for t, _ in e.top] for e in plain]
    assert flat(drafted) == pytest.approx(flat(plain), abs=1e-4)


def test_only_the_tokens_own_and_none(tiny_target: TargetFactory) -> None:
    target = open_target(tiny_target("llama", "q8_0"))
    engine, prompt = Engine(target), target.tokenize(PROMPT)
    _, own = collect(engine, prompt, 0)
    assert len(own) == N_TOKENS
    assert all(entry.top == [] and entry.logprob < 0 for entry in own)
    assert collect(engine, prompt, -1)[1] == []
    _, everything = collect(engine, prompt, 10**6)
    assert {len(entry.top) for entry in everything} == {target.n_vocab}
    with pytest.raises(ValueError, match="n_probs"):
        engine.submit(prompt, sampling(), n_probs=-2)


def test_behind_the_samplers(tiny_target: TargetFactory) -> None:
    """The softmax of what top-k and temperature leave: it adds up to one, and nothing else is told."""
    target = open_target(tiny_target("llama", "q8_0"))
    prompt, everything = target.tokenize(PROMPT), 10**6
    chain = {"temperature": 0.5, "top_k": 6, "top_p": 1.0, "min_p": 0.0, "seed": 3}
    emitted, sampled = collect(Engine(target), prompt, everything, post_sampling=True, **chain)
    assert collect(Engine(target), prompt, everything, **chain)[0] == emitted
    target.truncate(0, 0)
    for i, (token, entry) in enumerate(zip(emitted, sampled, strict=True)):
        logits = target.decode(0, prompt if i == 0 else [emitted[i - 1]])[0].astype(np.float64) / 0.5
        best = np.argsort(-logits, kind="stable")[:6]
        expected = np.exp(logits[best] - logits[best].max())
        expected /= expected.sum()
        assert [t for t, _ in entry.top] == best.tolist()
        assert np.exp([p for _, p in entry.top]) == pytest.approx(expected, abs=1e-4)
        assert entry.logprob == dict(entry.top)[token]


@pytest.mark.parametrize("options", [{}, {"repeat_penalty": 1.3}])
def test_greedy_behind_the_samplers_is_certain(tiny_target: TargetFactory, options: dict[str, float]) -> None:
    target = open_target(tiny_target("llama", "q8_0"))
    emitted, sampled = collect(Engine(target), target.tokenize(PROMPT), N_TOP, post_sampling=True, **options)
    assert [(entry.logprob, entry.top) for entry in sampled] == [(0.0, [(token, 0.0)]) for token in emitted]
