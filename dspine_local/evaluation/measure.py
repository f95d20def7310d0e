"""Runs prompts through the engine at temperature 0 and counts what was accepted, by category and position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspine_local.engine import Engine
from dspine_local.errors import ContextLengthError
from dspine_local.evaluation.prompts import Prompt
from dspine_local.generation import Generation
from dspine_local.options import GREEDY
from dspine_local.stats import GenerationStats

Report = Callable[[int, int, str], None]


@dataclass(frozen=True)
class SetResult:
    """One category, or all. ``acceptance_length`` is emitted tokens per round, None without a round.

    ``accepted_by_position[i]``: of the drafts that had a token i (those at an answer's end are shorter), the share with
    token i accepted, which takes all before it being so.
    """

    category: str
    n_prompts: int
    n_tokens: int
    n_rounds: int
    acceptance_length: float | None
    accepted_by_position: tuple[float, ...]


@dataclass(frozen=True)
class EvaluationReport:
    """``mean`` is the mean of the categories' acceptance lengths; ``skipped`` prompts did not fit the context."""

    n_draft: int
    max_tokens: int
    categories: tuple[SetResult, ...]
    mean: float | None
    skipped: int

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 256,
    n_draft: int | None = None,
    report: Report = lambda _done, _total, _label: None,
) -> EvaluationReport:
    """Answer every prompt greedily, several at a time when the engine has slots for it.

    Args:
        max_tokens: Tokens of each answer at most.
        n_draft: Tokens drafted per round; None is as many as the engine can.
    """
    n_draft = engine.max_draft if n_draft is None else n_draft
    stats: dict[str, list[GenerationStats]] = {prompt.category: [] for prompt in prompts}
    n_skipped = n_done = 0

    def answer(messages: list[dict[str, str]]) -> Generation | None:
        try:
            return engine.chat(messages, max_tokens=max_tokens, n_draft=n_draft, cache_prompt=False, sampling=GREEDY)
        except ContextLengthError:
            return None

    for first in range(0, len(prompts), engine.options.n_parallel):
        part = prompts[first : first + engine.options.n_parallel]
        chats: list[list[dict[str, str]]] = [[] for _ in part]
        for turn in range(max(len(prompt.turns) for prompt in part)):
            running = []
            for prompt, chat in zip(part, chats, strict=True):
                if turn < len(prompt.turns):
                    chat.append({"role": "user", "content": prompt.turns[turn]})
                    running.append((prompt, chat, answer(chat)))
            for prompt, chat, generation in running:
                if generation is None:
                    n_skipped += 1
                    continue
                chat.append({"role": "assistant", "content": generation.read()})
                if generation.stats is not None:
                    stats[prompt.category].append(generation.stats)
        n_done += len(part)
        report(n_done, len(prompts), part[-1].category)
    categories = tuple(summarize(category, found) for category, found in stats.items())
    lengths = [c.acceptance_length for c in categories if c.acceptance_length is not None]
    return EvaluationReport(
        n_draft=n_draft,
        max_tokens=max_tokens,
        categories=categories,
        mean=sum(lengths) / len(lengths) if lengths else None,
        skipped=n_skipped,
    )


def summarize(category: str, stats: Sequence[GenerationStats]) -> SetResult:
    """Add up the requests of one category."""
    n_rounds = sum(s.rounds for s in stats)
    n_emitted = n_rounds + sum(s.accepted for s in stats)
    n_positions = max((len(s.drafted_per_position) for s in stats), default=0)

    def total(counts: Sequence[tuple[int, ...]], i: int) -> int:
        return sum(c[i] for c in counts if i < len(c))

    drafted = [total([s.drafted_per_position for s in stats], i) for i in range(n_positions)]
    accepted = [total([s.accepted_per_position for s in stats], i) for i in range(n_positions)]
    return SetResult(
        category=category,
        n_prompts=len(stats),
        n_tokens=sum(s.generated for s in stats),
        n_rounds=n_rounds,
        acceptance_length=n_emitted / n_rounds if n_rounds else None,
        accepted_by_position=tuple(a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True)),
    )
