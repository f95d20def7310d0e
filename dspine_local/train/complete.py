"""Completing many prompts at once: what the data stage asks of the target, and how the engine does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dspine_local.engine import Engine
from dspine_local.options import SamplingOptions


@dataclass(frozen=True)
class Job:
    """A prompt to complete. Sampling is at ``temperature`` among the ``top_k`` most likely tokens up to ``top_p``."""

    tokens: list[int]
    max_tokens: int
    temperature: float
    seed: int
    top_k: int = 40
    top_p: float = 0.95


@dataclass(frozen=True)
class Completion:
    """``tokens`` are prompt and completion; ``ended`` whether the target ended it itself.

    ``features`` float16 [n_tokens, (n_taps + 1) * D], taps and final hidden state, where the completer gives them;
    the last token has none (zeros).
    """

    index: int
    tokens: list[int]
    ended: bool
    features: npt.NDArray[np.float16] | None = None


class Completer(Protocol):
    """Completes prompts."""

    def run(self, jobs: Sequence[Job]) -> Iterator[Completion]:
        """Completions as they end, in any order; ``index`` is the job's place."""


class EngineCompleter:
    """By the engine, plainly, in as many slots as it has."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, jobs: Sequence[Job]) -> Iterator[Completion]:
        """Completions in order."""
        running = []
        for job in jobs:
            sampling = SamplingOptions(
                temperature=job.temperature, top_k=job.top_k, top_p=job.top_p, min_p=0.0, seed=job.seed
            )
            running.append(self._engine.generate(job.tokens, max_tokens=job.max_tokens, sampling=sampling))
        for index, generation in enumerate(running):
            generation.read()
            yield Completion(index, generation.prompt_tokens + generation.tokens, generation.finish_reason == "stop")
