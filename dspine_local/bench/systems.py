"""What is compared: ways to answer a prompt, each under a name of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Protocol

from dspine_local.checks import OptionError
from dspine_local.engine import Engine
from dspine_local.options import GenerationOptions
from dspine_local.stats import GenerationStats

# How an answer was timed: rounds of our engine, the server's own timings, or the wall time of the whole request.
Clock = Literal["rounds", "timings", "wall"]

PLAIN, AUTO = "plain", "auto"
DEFAULT_MODES = (PLAIN, "fixed:3", "fixed:7", AUTO)


@dataclass(frozen=True)
class Task:
    """A prompt, as text for servers and as tokens of its whole chat for our engine."""

    category: str
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """An answer and what it cost.

    ``timed_s`` seconds were spent on ``n_timed`` of its ``n_tokens``: on those behind the first, which the prompt's own
    decode gives, or on all of them and the prompt where the clock is ``wall``. ``n_rounds`` are the decodes of those
    tokens, None where a server does not tell. ``tokens`` and ``stats`` are our engine's.
    """

    text: str
    n_tokens: int
    n_timed: int
    timed_s: float
    clock: Clock
    prefill_s: float | None = None
    n_rounds: int | None = None
    tokens: tuple[int, ...] | None = None
    stats: GenerationStats | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """None where no time was measured."""
        return self.n_timed / self.timed_s if self.timed_s > 0 else None


class System(Protocol):
    """One of the compared ways to answer."""

    @property
    def name(self) -> str:
        """As it is called in every result."""

    @property
    def is_ours(self) -> bool:
        """Whether its answers must be the same as those of our other modes."""

    def answer(self, task: Task) -> Answer:
        """Answer a prompt from its beginning, without anything that is left of earlier answers."""


@dataclass(frozen=True)
class EngineMode:
    """Our engine with a certain draft length: None is the automatic choice, 0 plain decoding."""

    name: str
    engine: Engine
    n_draft: int | None
    options: GenerationOptions
    is_ours: bool = True

    def answer(self, task: Task) -> Answer:
        """See ``System``."""
        with self.engine.generate(task.tokens, self.options, n_draft=self.n_draft, cache_prompt=False) as generation:
            text = generation.read()
        stats = generation.stats
        assert stats is not None  # an answer has at least one token
        return Answer(
            text=text,
            n_tokens=stats.generated,
            n_timed=stats.rounds + stats.accepted,
            timed_s=stats.draft_s + stats.verify_s + stats.commit_s + stats.other_s,
            clock="rounds",
            prefill_s=stats.prefill_s,
            n_rounds=stats.rounds,
            tokens=tuple(generation.tokens),
            stats=stats,
        )


def parse_modes(text: str) -> dict[str, int | None]:
    """Draft lengths by mode from ``plain,fixed:3,auto``.

    Raises:
        OptionError: No mode, an unknown or a repeated one.
    """
    modes: dict[str, int | None] = {}
    for name in (part.strip() for part in text.split(",")):
        if name in modes or not is_mode(name):
            raise OptionError("compare", text, "different modes of plain, fixed:K and auto, separated by commas")
        modes[name] = {PLAIN: 0, AUTO: None}[name] if name in (PLAIN, AUTO) else int(name.removeprefix("fixed:"))
    return modes


def is_mode(name: str) -> bool:
    """Whether this is ``plain``, ``auto`` or ``fixed:K``."""
    return re.fullmatch(rf"{PLAIN}|{AUTO}|fixed:[1-9]\d{{0,5}}", name) is not None


def default_modes(max_draft: int) -> dict[str, int | None]:
    """Those of ``DEFAULT_MODES`` that a drafter of this length can do; plain decoding without one (0)."""
    modes = parse_modes(",".join(DEFAULT_MODES))
    return {name: n for name, n in modes.items() if n == 0 or (max_draft > 0 and (n is None or n <= max_draft))}
