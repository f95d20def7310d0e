"""Which types are worth having, and which one to take. Pure arithmetic on what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspine_local.sweep.result import PromptResult, TypeResult, acceptance_length, draft_share, need_spread

N_DRAWS = 1000
# A type may be slower than the fastest by so much, at most, however few prompts there are.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Comparison:
    """A type beside the others.

    Args:
        speed: Expected tokens per second over those of the fastest type: acceptance length over verify and draft time.
        low, high: Of that ratio, the middle 95 % of bootstrap draws of prompts.
        length_difference: Acceptance length less that of the largest file.
        length_low, length_high: Likewise, the middle 95 %.
        is_pareto: No other type is as small and as fast.
        as_fast: Not measurably slower than the fastest.
    """

    result: TypeResult
    speed: float
    low: float
    high: float
    length_difference: float
    length_low: float
    length_high: float
    is_pareto: bool
    as_fast: bool


def compare(results: Sequence[TypeResult], *, seed: int = 0) -> list[Comparison]:
    """Every type against the fastest one, and against the largest file, on the same draws of prompts.

    Raises:
        ValueError: No types, types of different prompts, or fewer than two prompts of a category.
    """
    if not results or len({tuple(p.category for p in r.prompts) for r in results}) != 1:
        raise ValueError("types can be compared on the same prompts only, and there must be one")
    need_spread([p.category for p in results[0].prompts])
    speeds = [_speed(r.prompts) for r in results]
    fastest = max(range(len(results)), key=lambda i: speeds[i])
    largest = max(range(len(results)), key=lambda i: results[i].n_bytes)
    ratios: list[list[float]] = [[] for _ in results]
    differences: list[list[float]] = [[] for _ in results]
    rng = np.random.default_rng(seed)
    for chosen in (_draw(results[0].prompts, rng) for _ in range(N_DRAWS)):
        drawn = [[r.prompts[i] for i in chosen] for r in results]
        lengths = [acceptance_length(prompts) for prompts in drawn]
        drawn_speeds = [_speed(prompts) for prompts in drawn]
        for i in range(len(results)):
            ratios[i].append(drawn_speeds[i] / drawn_speeds[fastest])
            differences[i].append(lengths[i] - lengths[largest])
    compared = []
    for i, result in enumerate(results):
        speed = speeds[i] / speeds[fastest]
        low, high = _middle(ratios[i])
        length_low, length_high = _middle(differences[i])
        beaten = any(
            r.n_bytes <= result.n_bytes and s >= speeds[i] and (r.n_bytes, s) != (result.n_bytes, speeds[i])
            for r, s in zip(results, speeds, strict=True)
        )
        compared.append(
            Comparison(
                *(result, speed, low, high),
                *(result.length - results[largest].length, length_low, length_high),
                is_pareto=not beaten,
                as_fast=speed >= 1 - TOLERANCE and high >= 1,
            )
        )
    return compared


def recommend(compared: Sequence[Comparison]) -> Comparison:
    """The smallest file that is not measurably slower than the fastest type."""
    return min((c for c in compared if c.as_fast), key=lambda c: c.result.n_bytes)


def _speed(prompts: Sequence[PromptResult]) -> float:
    """Tokens per time of one decode: verifying costs the same whatever the drafter's type."""
    return acceptance_length(prompts) / (1 + draft_share(prompts))


def _draw(prompts: Sequence[PromptResult], rng: np.random.Generator) -> list[int]:
    """As many prompts of each category as there are, with repetition."""
    by_category: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_category.setdefault(prompt.category, []).append(i)
    return [i for some in by_category.values() for i in rng.choice(some, len(some)).tolist()]


def _middle(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    cut = len(ordered) * 25 // 1000
    return ordered[cut], ordered[-1 - cut]
