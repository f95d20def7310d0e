"""The rig of the engine's tests: tiny targets, scripted drafters, one request or several until they end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tiny_models import TinyTarget

from dspine_local._native import CallbackDrafter, DraftSource, Engine, RequestStats, SamplingParams, StepEvent, Target

PROMPT = "The quick brown fox jumps over the lazy dog."
MAX_DRAFT = 15

Script = Callable[[int, list[int], int], list[int]]


def open_target(tiny: TinyTarget, **options: Any) -> Target:
    """Load with the settings under which a batch gives each token the logits it has alone (tiny_models.py)."""
    exact: dict[str, Any] = {"n_ctx": 512, "n_rollback": MAX_DRAFT, "n_threads": 1, "n_ubatch": 32}
    if tiny.qtype == "f32":
        exact |= {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
    else:
        exact |= {"flash_attn": "on"}
    return Target(str(tiny.path), **(exact | options))


def sampling(**options: Any) -> SamplingParams:
    """Greedy unless the options say otherwise."""
    params = SamplingParams()
    for name, value in ({"temperature": 0.0, "seed": 1} | options).items():
        setattr(params, name, value)
    return params


@dataclass
class Answer:
    """What one request got, step by step."""

    tokens: list[int] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    stats: RequestStats | None = None

    def add(self, event: StepEvent) -> None:
        assert self.finish_reason is None, "an event after the last"
        self.tokens += event.tokens
        self.steps.append(event.tokens)
        self.finish_reason, self.error, self.stats = event.finish_reason, event.error, event.stats

    @property
    def final(self) -> RequestStats:
        assert self.stats is not None
        return self.stats


def finish(engine: Engine, ids: Iterable[int], *, max_steps: int = 2000) -> list[Answer]:
    """Step until the engine has no work; the answers of these requests, in their order."""
    answers = {i: Answer() for i in ids}
    for _ in range(max_steps):
        if not engine.has_work():
            break
        for event in engine.step():
            if event.id in answers:
                answers[event.id].add(event)
    assert not engine.has_work()
    assert all(a.finish_reason for a in answers.values())
    return list(answers.values())


def ask(engine: Engine, tokens: list[int], params: SamplingParams | None = None, **options: Any) -> Answer:
    """One request to its end."""
    (answer,) = finish(engine, [engine.submit(tokens, params or sampling(), **options)])
    return answer


def assert_in_step(engine: Engine) -> None:
    """Both caches of every slot are equally long."""
    for slot in range(engine.n_slots):
        target, drafter = engine.lengths(slot)
        assert drafter in (-1, target)


def scripted(script: Script, *, n_seq: int = 1, max_draft: int = MAX_DRAFT) -> CallbackDrafter:
    return CallbackDrafter(script, n_seq=n_seq, max_draft=max_draft)


def perfect(*known: list[int]) -> Script:
    """Knows whole sequences, prompt and answer, and continues the one that the tokens so far begin."""

    def script(_seq: int, tokens: list[int], n: int) -> list[int]:
        for whole in known:
            if whole[: len(tokens)] == tokens:
                return whole[len(tokens) : len(tokens) + n]
        return []

    return script


def first_right(k: int, n_vocab: int, *known: list[int]) -> Script:
    """The first k tokens right, the others wrong; k = 0 is always wrong."""
    right = perfect(*known)

    def script(seq: int, tokens: list[int], n: int) -> list[int]:
        draft = right(seq, tokens, n)
        return draft[:k] + [(token + 1) % n_vocab for token in draft[k:]]

    return script


def guessing(seed: int, n_vocab: int, *known: list[int]) -> Script:
    """Each token right in 70 % of the cases, drafts of any length up to n."""
    right, rng = perfect(*known), random.Random(seed)

    def script(seq: int, tokens: list[int], n: int) -> list[int]:
        draft = right(seq, tokens, rng.randint(0, n))
        return [token if rng.random() < 0.7 else rng.randrange(n_vocab) for token in draft]

    return script


def scripts(n_vocab: int, *known: list[int]) -> dict[str, Script]:
    """Every kind of scripted drafter for these sequences."""
    return {
        "perfect": perfect(*known),
        "wrong": first_right(0, n_vocab, *known),
        "first_2": first_right(2, n_vocab, *known),
        "random": guessing(5, n_vocab, *known),
    }


def check_stats(answer: Answer) -> None:
    """The counters agree with what was emitted."""
    stats = answer.final
    assert stats.n_generated == len(answer.tokens)
    assert 0 <= stats.n_accepted <= stats.n_drafted
    assert sum(stats.drafted_at) == stats.n_drafted
    assert sum(stats.accepted_at) == stats.n_accepted
    if answer.tokens:
        assert stats.n_generated == 1 + stats.n_rounds + stats.n_accepted


def drafting_engine(target: Target, source: Script | DraftSource, n_draft: int = MAX_DRAFT) -> Engine:
    """An engine over a target that a test may share with others: its caches start empty."""
    drafter = source if isinstance(source, DraftSource) else scripted(source, n_seq=target.n_seq)
    return Engine(target, drafter, n_draft=n_draft)


def step_into(engine: Engine, answers: dict[int, Answer]) -> None:
    """One step; its events go to the answers of their requests."""
    for event in engine.step():
        answers.setdefault(event.id, Answer()).add(event)
