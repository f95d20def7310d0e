"""Made-up rounds for the draft-length policy: a staircase of costs, a drafter that knows itself well or badly."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dspine_local._native import DraftLengthPolicy, Forecast

# Acceptance of the token at a place: the drafter's own probability of it, and the true one.
Draw = Callable[[random.Random, int], tuple[float, float]]


def steps(costs: dict[int, float], n: int) -> float:
    """A staircase: the cost of the next listed number of columns."""
    return min((us for key, us in costs.items() if key >= n), default=max(costs.values()) * n / max(costs))


# Milliseconds of SmolLM2 on two cores, as steps (docs/results); a decode of one token is 1.
STAIRS: dict[str, dict[int, float]] = {
    "flat": {1: 1.0, 16: 1.15},
    "bf16": {1: 1.0, 2: 1.55, 4: 2.11, 8: 2.56, 16: 4.26},
    "q8_0": {1: 1.0, 2: 1.97, 4: 2.55, 8: 3.59, 16: 5.72},
    "q4_0": {1: 1.0, 2: 1.61, 3: 2.53, 4: 2.57, 6: 3.69, 8: 3.91, 12: 5.6, 16: 6.33},
    "cliff": {1: 1.0, 4: 1.1, 16: 6.0},
    "linear": {n: float(n) for n in range(1, 17)},
}


class Trace:
    """Drafts behind every token of real answers (benchmarks/record_drafts.py)."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self._probabilities = arrays["probabilities"].astype(float)
            self._n_right = arrays["n_right"].astype(int)
            self._starts = [*map(int, arrays["starts"]), len(self._n_right)]

    def __len__(self) -> int:
        return len(self._n_right)

    @property
    def max_draft(self) -> int:
        return int(self._probabilities.shape[1])

    def draft(self, place: int, n: int) -> tuple[list[float], int]:
        return [float(q) for q in self._probabilities[place][:n]], min(int(self._n_right[place]), n)

    def length_at(self, place: int) -> int:
        """Of the answer that begins there."""
        return self._starts[self._starts.index(place) + 1] - place


@dataclass
class World:
    """Costs in milliseconds, disturbed by some percent; ``draft_base`` and ``draft_token`` are the drafter's.

    Acceptance is drawn at random, or read from a trace: what a real drafter would have drafted at every place.
    """

    verify: dict[int, float]
    draw: Draw | None = None
    trace: Trace | None = None
    draft_base: float = 0.4
    draft_token: float = 0.03
    noise: float = 0.05
    drift: float = 1.0  # factor of the target's cost after load
    request: int = 128  # tokens of each, where they are drawn
    seed: int = 1
    rng: random.Random = field(init=False)
    place: int = 0  # in the trace, or among all tokens so far
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.left = self._request_length()

    def verify_us(self, n_rows: int) -> float:
        return 1000 * steps(self.verify, n_rows)

    def draft_us(self, n: int) -> float:
        return 1000 * (self.draft_base + self.draft_token * n) if n else 0.0

    def noisy(self, us: float) -> float:
        return us * self.rng.lognormvariate(0, self.noise) * (1.5 if self.rng.random() < 0.01 else 1.0)

    def policy(self, max_draft: int = 15, *, apart: bool = False) -> DraftLengthPolicy:
        """As after a sweep at load."""
        return DraftLengthPolicy(
            [(n, self.noisy(self.verify_us(n))) for n in range(1, max_draft + 2)],
            [(n, self.noisy(self.draft_us(n))) for n in range(1, max_draft + 1)],
            apart=apart,
        )

    def draft(self, n: int) -> tuple[list[float], int]:
        """The drafter's probabilities of n tokens, and how many of them the target would emit."""
        if self.trace is not None:
            return self.trace.draft(self.place, n)
        assert self.draw is not None
        drawn = [self.draw(self.rng, self.place + j) for j in range(n)]
        n_right = 0
        while n_right < n and self.rng.random() < drawn[n_right][1]:
            n_right += 1
        return [q for q, _ in drawn], n_right

    def emit(self, n: int) -> bool:
        """So many tokens are out; whether the request has ended, and another begun."""
        self.place += n
        self.left -= n
        if self.left > 0:
            return False
        if self.trace is not None:
            self.place %= len(self.trace)
        self.left = self._request_length()
        return True

    def _request_length(self) -> int:
        return self.request if self.trace is None else self.trace.length_at(self.place)


@dataclass
class Run:
    """What a simulation came to: tokens for the time of a thousand plain decodes, and the lengths verified."""

    tokens: int = 0
    us: float = 0.0
    lengths: list[int] = field(default_factory=list)

    def add(self, tokens: int, us: float, length: int) -> None:
        self.tokens += tokens
        self.us += us
        self.lengths.append(length)

    @property
    def rate(self) -> float:
        return self.tokens / self.us * 1000


def fixed(world: World, longest: int, n_rounds: int, *, exact: Sequence[int] = ()) -> Run:
    """Every round the same length, or what is left of a request; with ``exact``, the longest of these."""
    run = Run()
    for _ in range(n_rounds):
        n = min(longest, world.left - 1)
        n = max((length for length in exact if length <= n), default=0) if exact else n
        _, n_right = world.draft(n)
        run.add(n_right + 1, world.noisy(world.drift * world.verify_us(n + 1)) + world.noisy(world.draft_us(n)), n)
        world.emit(n_right + 1)
    return run


def automatic(
    world: World,
    n_rounds: int,
    *,
    max_draft: int = 15,
    policy: DraftLengthPolicy | None = None,
    exact: Sequence[int] = (),
) -> Run:
    """The policy's lengths, as the engine would ask for them; with ``exact``, a strict one."""
    policy = world.policy(max_draft, apart=bool(exact)) if policy is None else policy
    run, forecast = Run(), Forecast()
    for _ in range(n_rounds):
        limit = min(max_draft, world.left - 1)
        usable = [n for n in exact if n <= limit]
        limit = max(usable, default=0) if exact else limit
        slots = [(forecast, limit)] if limit > 0 else []
        lengths = [usable] if slots else []
        plan = policy.plan(slots, lengths=lengths)
        probabilities, n_right = world.draft(plan.n_draft)
        n_verified = policy.cut(plan, slots, [probabilities], lengths=lengths)[0] if plan.n_draft else 0
        n_accepted = min(n_right, n_verified)
        verify_us = world.noisy(world.drift * world.verify_us(n_verified + 1))
        draft_us = world.noisy(world.draft_us(plan.n_draft))
        if plan.n_draft:
            # The token behind the accepted ones is the target's: it tells about one more of the draft.
            n_agreed = min(n_right, n_accepted + 1)
            ended = n_agreed == n_right and n_agreed < plan.n_draft
            policy.observe_draft(forecast, probabilities, n_agreed, ended=ended)
        policy.observe_round(
            plan,
            n_rows=n_verified + 1,
            n_columns=plan.n_draft,
            verify_us=verify_us,
            draft_us=draft_us,
            rest_us=1.0,
            n_emitted=n_accepted + 1,
        )
        run.add(n_accepted + 1, verify_us + draft_us, n_verified)
        if world.emit(n_accepted + 1):
            forecast = Forecast()
    return run
