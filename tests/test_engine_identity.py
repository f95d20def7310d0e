"""Drafting never changes an answer: token identity with plain decoding."""

from __future__ import annotations

import re
from collections.abc import Callable
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
    first_right,
    open_target,
    perfect,
    sampling,
    scripts,
)
from tiny_models import ARCHITECTURES, TinyTarget

from dspine_local._native import Drafter, Engine, Target
from dspine_local.convert import convert_checkpoint

pytestmark = pytest.mark.native

N_TOKENS = 60
JSON_LIKE = 'root ::= "{" item ("," item)* "}"\nitem ::= "\\"" [a-z]+ "\\":" [0-9]+\n'
SAMPLERS: dict[str, dict[str, Any]] = {
    "repeat_penalty": {"repeat_penalty": 1.3},
    "repeat_last_n": {"repeat_penalty": 1.5, "repeat_last_n": 8},
    "repeat_whole_context": {"repeat_penalty": 1.2, "repeat_last_n": -1},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "presence_penalty": {"presence_penalty": 1.1},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "logit_bias": {"logit_bias": [(65, 4.0), (66, -100.0), (100, float("-inf"))]},
    "ignore_eos": {"ignore_eos": True, "repeat_penalty": 1.1},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 1.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "dynamic_temperature": {"temperature": 1.0, "dynatemp_range": 0.7, "dynatemp_exponent": 1.3},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "min_p": {"temperature": 1.2, "min_p": 0.2},
    "typical": {"temperature": 1.0, "typical_p": 0.5},
    "top_n_sigma": {"temperature": 1.0, "top_n_sigma": 1.5},
    "xtc": {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "everything": {
        "temperature": 0.9,
        "repeat_penalty": 1.15,
        "frequency_penalty": 0.3,
        "dry_multiplier": 0.8,
        "xtc_probability": 0.3,
        "typical_p": 0.9,
        "logit_bias": [(65, 2.0)],
    },
    "grammar": {"grammar": JSON_LIKE},
    "grammar_sampled": {"grammar": JSON_LIKE, "temperature": 1.0, "repeat_penalty": 1.2},
}

Opened = tuple[TinyTarget, Target]


@pytest.fixture(scope="module")
def opened(tiny_target: TargetFactory) -> Callable[[str, str], Opened]:
    """One target per architecture and type, shared by this module's engines."""
    made: dict[tuple[str, str], Opened] = {}

    def get(arch: str, qtype: str) -> Opened:
        if (arch, qtype) not in made:
            tiny = tiny_target(arch, qtype)
            made[arch, qtype] = (tiny, open_target(tiny))
        return made[arch, qtype]

    return get


def assert_same(answer: Answer, plain: Answer, engine: Engine) -> None:
    assert answer.tokens == plain.tokens
    assert answer.finish_reason == plain.finish_reason
    check_stats(answer)
    assert_in_step(engine)


@pytest.mark.parametrize("qtype", ["f32", "q8_0"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy(opened: Callable[[str, str], Opened], arch: str, qtype: str) -> None:
    tiny, target = opened(arch, qtype)
    prompt = target.tokenize(PROMPT)
    plain = ask(Engine(target), prompt, max_tokens=N_TOKENS)
    assert len(plain.tokens) == N_TOKENS
    assert plain.finish_reason == "length"
    whole = prompt + plain.tokens
    for name, script in scripts(tiny.n_vocab, whole).items():
        engine = drafting_engine(target, script)
        for n_draft in range(1, MAX_DRAFT + 1):
            answer = ask(engine, prompt, max_tokens=N_TOKENS, n_draft=n_draft)
            assert_same(answer, plain, engine)
            if name == "perfect":
                assert answer.final.n_accepted == answer.final.n_drafted
                assert answer.final.n_rounds == -(-(N_TOKENS - 1) // (n_draft + 1))
            if name == "wrong":
                assert answer.final.n_accepted == 0
                assert answer.final.n_drafted > 0
            if name == "first_2":
                assert answer.final.accepted_at[2:] == [0] * (len(answer.final.accepted_at) - 2)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_first_k_right(opened: Callable[[str, str], Opened], arch: str) -> None:
    tiny, target = opened(arch, "q8_0")
    prompt = target.tokenize(PROMPT)
    plain = ask(Engine(target), prompt, max_tokens=N_TOKENS)
    for k in range(MAX_DRAFT + 1):
        engine = drafting_engine(target, first_right(k, tiny.n_vocab, prompt + plain.tokens))
        answer = ask(engine, prompt, max_tokens=N_TOKENS)
        assert_same(answer, plain, engine)
        # All rounds but the last accept exactly k.
        assert answer.final.n_rounds == -(-(N_TOKENS - 1) // (k + 1))


@pytest.mark.parametrize("qtype", ["f32", "q8_0"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_real_drafter(
    opened: Callable[[str, str], Opened], tiny_drafter: DrafterFactory, tmp_path: Path, arch: str, qtype: str
) -> None:
    tiny, target = opened(arch, qtype)
    prompt = target.tokenize(PROMPT)
    params = [sampling(), sampling(temperature=0.8, seed=7)]
    plain = [ask(Engine(target), prompt, p, max_tokens=40) for p in params]
    for architecture in ("DSpineDraftModel", "DFlashDraftModel"):
        gguf = tmp_path / f"{architecture}.gguf"
        convert_checkpoint(tiny_drafter(tiny, architecture=architecture), gguf, outtype="q8_0", target=tiny.path)
        drafter = Drafter(str(gguf), target.tensors(), n_ctx=512, n_threads=1)
        engine = drafting_engine(target, drafter)
        for n_draft in (1, 2, 7, MAX_DRAFT):
            for p, expected in zip(params, plain, strict=True):
                answer = ask(engine, prompt, p, max_tokens=40, n_draft=n_draft)
                assert_same(answer, expected, engine)
                assert answer.final.n_drafted > 0
                assert drafter.length(0) == target.length(0) == len(prompt) + 40 - 1


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_sampler(opened: Callable[[str, str], Opened], arch: str, name: str) -> None:
    tiny, target = opened(arch, "q8_0")
    prompt = target.tokenize(PROMPT)
    for seed in (1, 2) if arch == "llama" else (3,):
        params = sampling(**({"seed": seed} | SAMPLERS[name]))
        plain = ask(Engine(target), prompt, params, max_tokens=N_TOKENS)
        assert plain.tokens
        known = scripts(tiny.n_vocab, prompt + plain.tokens)
        for script in (known["perfect"], known["random"]):
            engine = drafting_engine(target, script)
            for n_draft in (4, MAX_DRAFT):
                assert_same(ask(engine, prompt, params, max_tokens=N_TOKENS, n_draft=n_draft), plain, engine)


def test_samplers_are_not_all_the_same(opened: Callable[[str, str], Opened]) -> None:
    """Each setting changes the answer, so the test above tests it."""
    _, target = opened("llama", "q8_0")
    prompt = target.tokenize(PROMPT)
    answers = {n: ask(Engine(target), prompt, sampling(**o), max_tokens=N_TOKENS).tokens for n, o in SAMPLERS.items()}
    greedy = ask(Engine(target), prompt, max_tokens=N_TOKENS).tokens
    hot = ask(Engine(target), prompt, sampling(**SAMPLERS["hot"] | {"temperature": 1.0}), max_tokens=N_TOKENS).tokens
    for name, tokens in answers.items():
        assert tokens not in (greedy, hot), name
    assert len({tuple(tokens) for tokens in answers.values()}) == len(answers)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_grammar_stays_in_step(opened: Callable[[str, str], Opened], arch: str) -> None:
    """The drafted text breaks the grammar in the middle of a block; the answer never does."""
    tiny, target = opened(arch, "q8_0")
    prompt = target.tokenize(PROMPT)
    grammar = 'root ::= "[" [0-9]{2} ("," [0-9]{2}){3} "]"\n'
    for temperature in (0.0, 1.0):
        params = sampling(temperature=temperature, grammar=grammar)
        plain = ask(Engine(target), prompt, params, max_tokens=N_TOKENS)
        text = b"".join(target.piece(t) for t in plain.tokens).decode()
        assert re.fullmatch(r"\[\d\d(,\d\d){3}\]", text)
        assert plain.finish_reason == "stop"
        assert target.is_end_of_generation(plain.tokens[-1])
        whole = prompt + plain.tokens
        for n_draft in (1, 3, 7, MAX_DRAFT):
            for script in [*scripts(tiny.n_vocab, whole).values(), lambda _s, _t, n: [0] * n]:
                engine = drafting_engine(target, script, n_draft)
                assert_same(ask(engine, prompt, params, max_tokens=N_TOKENS), plain, engine)
        overrun = drafting_engine(target, lambda s, t, n, w=whole: (perfect(w)(s, t, n) + [5] * n)[:n])
        assert_same(ask(overrun, prompt, params, max_tokens=N_TOKENS), plain, overrun)


def test_a_seed_gives_the_same_answer_again(opened: Callable[[str, str], Opened]) -> None:
    _, target = opened("llama", "q8_0")
    prompt = target.tokenize(PROMPT)
    engine = drafting_engine(target, lambda _s, _t, n: [1] * n)
    first, again, other = (
        ask(engine, prompt, sampling(temperature=1.0, seed=s), max_tokens=N_TOKENS).tokens for s in (3, 3, 4)
    )
    assert first == again != other
    random_seed = sampling(temperature=1.0, seed=2**32 - 1)
    assert len({tuple(ask(engine, prompt, random_seed, max_tokens=N_TOKENS).tokens) for _ in "ab"}) == 2
