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
    engine: Engine, tokens: list[int], n_probs: int, **options: object
) -> tuple[list[int], list[TokenLogprobs]]:
    request = engine.submit(tokens, sampling(**options), max_tokens=N_TOKENS, n_probs=n_probs, cache_prompt=False)
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


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "repeat_penalty": 1.3, "seed": 3}])
@pytest.mark.parametrize("kind", ["perfect", "wrong", "first_2", "random"])
def test_drafted_tokens_have_those_of_plain_decoding(
    tiny_target: TargetFactory, kind: str, options: dict[str, float]
) -> None:
    tiny = tiny_target("llama", "q8_0")
    target = open_target(tiny)
    prompt = target.tokenize(PROMPT)
    emitted, plain = collect(Engine(target), prompt, N_TOP, **options)
    engine = drafting_engine(target, scripts(tiny.n_vocab, prompt + emitted)[kind], MAX_DRAFT)
    drafted_tokens, drafted = collect(engine, prompt, N_TOP, **options)
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
