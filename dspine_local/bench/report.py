"""Figures of a run: medians with quartiles by system and category, and whether all modes gave the same answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dspine_local.bench.profile import AcceptanceProfile
from dspine_local.bench.run import Measurement
from dspine_local.bench.systems import PLAIN, Clock, System, Task
from dspine_local.costs import DraftCosts
from dspine_local.evaluation.measure import summarize

FORMAT = 1
ALL = "all"
MIN_TOKENS = 8  # an answer with fewer is over before its speed can be told


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of n values."""

    n: int
    q1: float
    median: float
    q3: float


@dataclass(frozen=True)
class TimeShares:
    """Of the time of all rounds: drafting, the target's decodes, and all else (accept, cut back, commit)."""

    draft: float
    verify: float
    rest: float


@dataclass(frozen=True)
class SystemResult:
    """One system in one category, or in all.

    ``tokens_per_second`` and ``speedup`` leave out the ``n_short`` answers of fewer than 8 tokens. ``speedup`` is over
    pairs: an answer's tokens/s divided by those of plain decoding for the same prompt in the same repetition; None
    without plain decoding. ``acceptance_length`` is tokens per decode. ``accepted_per_position[i]`` is the accepted
    share of the drafts whose token i was verified; ``rounds_per_draft_length[k]`` counts rounds that verified k.
    """

    system: str
    category: str
    n_answers: int
    n_short: int
    tokens_per_second: Spread | None
    speedup: Spread | None
    acceptance_length: float | None
    prefill_s: float | None
    shares: TimeShares | None
    accepted_per_position: tuple[float, ...]
    rounds_per_draft_length: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """An answer of ours that is not the first mode's: ``position`` is that of the first token that differs."""

    system: str
    category: str
    prompt: str
    repetition: int
    position: int


@dataclass(frozen=True)
class EndpointAnswers:
    """A server's answers beside ours: other programs round differently, so they need not be the same."""

    system: str
    clock: Clock
    n_answers: int
    n_same_text: int


@dataclass(frozen=True)
class BenchReport:
    """All that a run has shown. ``setting`` says where and how (setting.py); ``costs`` are those at its end.

    ``n_replaced``: with simulated acceptance, tokens of which batches of another size would have made another one.
    """

    setting: dict[str, Any]
    profile: AcceptanceProfile | None
    results: tuple[SystemResult, ...]
    differences: tuple[Difference, ...]
    endpoints: tuple[EndpointAnswers, ...]
    costs: DraftCosts | None
    answers: tuple[dict[str, Any], ...]
    n_replaced: int = 0

    @property
    def identical(self) -> bool:
        """Whether all our modes gave the same answers, every time."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values (docs/benchmarking.md)."""
        return {"format": FORMAT, "identical": self.identical, "simulated": self.profile is not None} | asdict(self)


def make_report(
    systems: Sequence[System],
    tasks: Sequence[Task],
    measurements: Sequence[Measurement],
    *,
    setting: dict[str, Any],
    profile: AcceptanceProfile | None = None,
    costs: DraftCosts | None = None,
    n_replaced: int = 0,
) -> BenchReport:
    """Everything that follows from the measurements."""
    categories = [*dict.fromkeys(task.category for task in tasks), ALL]
    results = []
    for category in categories:
        chosen = [m for m in measurements if category in (ALL, tasks[m.task].category)]
        results += [summarize_system(system.name, category, chosen) for system in systems]
    ours = [system.name for system in systems if system.is_ours]
    references = {m.task: m for m in reversed(measurements) if m.system in ours[:1]}
    return BenchReport(
        setting=setting,
        profile=profile,
        results=tuple(results),
        differences=tuple(find_differences(ours, tasks, measurements, references)),
        endpoints=tuple(
            compare_endpoint(system.name, [m for m in measurements if m.system == system.name], references)
            for system in systems
            if not system.is_ours
        ),
        costs=costs,
        answers=tuple(_answer_json(m) for m in measurements),
        n_replaced=n_replaced,
    )


def summarize_system(name: str, category: str, measurements: Sequence[Measurement]) -> SystemResult:
    """One system's figures; ``measurements`` are all systems', for the pairs with plain decoding."""
    own = [m for m in measurements if m.system == name]
    speeds = {(m.task, m.repetition): speed for m in own if (speed := _speed(m)) is not None}
    plain = {
        (m.task, m.repetition): speed for m in measurements if m.system == PLAIN and (speed := _speed(m)) is not None
    }
    stats = [m.answer.stats for m in own if m.answer.stats is not None]
    prefills = [m.answer.prefill_s for m in own if m.answer.prefill_s is not None]
    n_rounds = [m.answer.n_rounds for m in own if m.answer.n_rounds is not None]
    n_decoded = sum(m.answer.n_timed for m in own if m.answer.n_rounds is not None)
    total_s = sum(s.draft_s + s.verify_s + s.commit_s + s.other_s for s in stats)
    lengths: Counter[int] = Counter()
    for s in stats:
        lengths.update(dict(enumerate(s.rounds_per_draft_length)))
    return SystemResult(
        system=name,
        category=category,
        n_answers=len(own),
        n_short=sum(m.answer.n_tokens < MIN_TOKENS for m in own),
        tokens_per_second=spread(speeds.values()),
        speedup=spread(speed / plain[pair] for pair, speed in speeds.items() if pair in plain),
        acceptance_length=n_decoded / sum(n_rounds) if sum(n_rounds) else None,
        prefill_s=float(np.median(prefills)) if prefills else None,
        shares=TimeShares(
            draft=sum(s.draft_s for s in stats) / total_s,
            verify=sum(s.verify_s for s in stats) / total_s,
            rest=sum(s.commit_s + s.other_s for s in stats) / total_s,
        )
        if total_s > 0
        else None,
        accepted_per_position=summarize(category, stats).accepted_by_position,
        rounds_per_draft_length=tuple(lengths[k] for k in range(max(lengths, default=-1) + 1)),
    )


def spread(values: Iterable[float]) -> Spread | None:
    """Median and quartiles, between values linearly; None for no values."""
    found = list(values)
    if not found:
        return None
    q1, median, q3 = np.quantile(found, (0.25, 0.5, 0.75))
    return Spread(len(found), float(q1), float(median), float(q3))


def find_differences(
    ours: Sequence[str], tasks: Sequence[Task], measurements: Sequence[Measurement], references: dict[int, Measurement]
) -> list[Difference]:
    """Answers of our modes whose tokens are not those of the reference for their prompt."""
    differences = []
    for m in measurements:
        found, expected = m.answer.tokens or (), references[m.task].answer.tokens or () if m.task in references else ()
        if m.system not in ours or found == expected:
            continue
        same = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
        position = min(len(found), len(expected)) if same is None else same
        task = tasks[m.task]
        differences.append(Difference(m.system, task.category, task.text, m.repetition, position))
    return differences


def compare_endpoint(
    name: str, measurements: Sequence[Measurement], references: dict[int, Measurement]
) -> EndpointAnswers:
    """How often a server's text is ours, apart from blanks around it, and the worst of its clocks."""
    same = [
        m.answer.text.strip() == references[m.task].answer.text.strip() for m in measurements if m.task in references
    ]
    clock: Clock = "wall" if any(m.answer.clock == "wall" for m in measurements) else "timings"
    return EndpointAnswers(name, clock, len(measurements), sum(same))


def _speed(measurement: Measurement) -> float | None:
    answer = measurement.answer
    return answer.tokens_per_second if answer.n_tokens >= MIN_TOKENS else None


def _answer_json(m: Measurement) -> dict[str, Any]:
    """What the figures were computed from, for other statistics."""
    answer = m.answer
    return {
        "system": m.system,
        "prompt": m.task,
        "repetition": m.repetition,
        "n_tokens": answer.n_tokens,
        "n_timed": answer.n_timed,
        "timed_s": answer.timed_s,
        "prefill_s": answer.prefill_s,
        "n_rounds": answer.n_rounds,
    }
