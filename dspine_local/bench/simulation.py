"""An engine whose drafter costs what it costs and is right as often as an acceptance profile says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspine_local import _native
from dspine_local.bench.profile import AcceptanceProfile
from dspine_local.engine import Engine
from dspine_local.files import StrPath
from dspine_local.generation import Generation
from dspine_local.loading import LoadedModels
from dspine_local.options import GREEDY, EngineOptions, GenerationOptions


class SimulatedEngine(Engine):
    """An engine with simulated acceptance, for one greedy request at a time, whose answer ``learn`` has found before.

    Requests stay on that answer. Where batches round differently the target would leave it, and every further draft
    would be wrong: there its token is replaced, and ``n_replaced`` counts how often.

    Args:
        profile: How often drafted tokens are right.
        seed: Of the draws: with the same one, the same positions are right in every run and for every draft length.
    """

    def __init__(
        self, target: StrPath, drafter: StrPath, options: EngineOptions, profile: AcceptanceProfile, *, seed: int
    ) -> None:
        self.profile = profile
        self._seed = seed
        self._answers: dict[tuple[int, ...], list[int]] = {}
        super().__init__(target, drafter, options)

    def _draft_source(self, models: LoadedModels) -> _native.DraftSource | None:
        if models.drafter is None:
            raise ValueError("simulated acceptance needs a drafter")
        self._simulated = _native.SimulatedDrafter(
            models.drafter, list(self.profile.acceptance), seed=self._seed, n_vocab=models.target.n_vocab
        )
        return self._simulated

    @property
    def n_replaced(self) -> int:
        """Tokens so far that the target would have chosen otherwise."""
        return self._native.n_replaced

    def _replay(self, prompt: list[int]) -> list[int]:
        return self._answers.get(tuple(prompt), [])

    def learn(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Find a prompt's answer by plain decoding."""
        generation = self.generate(prompt, n_draft=0, max_tokens=max_tokens, cache_prompt=False, sampling=GREEDY)
        generation.read()
        self._answers[tuple(prompt)] = generation.tokens

    def generate(
        self, prompt: str | Sequence[int], options: GenerationOptions | None = None, **overrides: Any
    ) -> Generation:
        """As of every engine; what is drafted depends on the answer that ``learn`` has found."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._simulated.expect(tokens, self._answers.get(tuple(tokens), []))
        return super().generate(tokens, options, **overrides)
