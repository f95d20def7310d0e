"""Answers and features in one go by the PyTorch target: many sequences per pass, a new one as soon as one ends.

What was computed to choose the tokens is what training needs, so that nothing is computed twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspine_local.train.complete import Completion, Job
from dspine_local.train.torch_target import FLOAT16_MAX, TorchTarget


@dataclass
class _Slot:
    index: int
    job: Job
    tokens: list[int]
    rng: np.random.Generator
    features: Tensor | None


class TorchGenerator:
    """Generates with a fixed number of slots.

    Args:
        taps: Layers to keep the outputs of; None keeps no features at all.
        n_positions: Longest sequence.
    """

    def __init__(
        self, target: TorchTarget, end_tokens: set[int], n_slots: int, n_positions: int, taps: Sequence[int] | None
    ) -> None:
        self._target, self._ends, self._taps = target, end_tokens, list(taps or [])
        self._keeps = taps is not None
        self._n_positions = n_positions
        self._cache = target.new_cache(n_slots, n_positions)
        self._slots: list[_Slot | None] = [None] * n_slots

    def run(self, jobs: Sequence[Job]) -> Iterator[Completion]:
        """Completions as they end, not in order.

        Raises:
            ValueError: A sequence that would not fit.
        """
        for job in jobs:
            if len(job.tokens) + job.max_tokens > self._n_positions or not job.tokens or job.max_tokens < 1:
                raise ValueError(
                    f"a prompt of {len(job.tokens)} tokens and an answer of {job.max_tokens}, expected at least one "
                    f"each, and {self._n_positions} together at most"
                )
        waiting = deque(enumerate(jobs))
        while waiting or any(self._slots):
            for i, slot in enumerate(self._slots):
                if slot is None and waiting:
                    yield from self._admit(i, *waiting.popleft())
            yield from self._step()

    def _admit(self, i: int, index: int, job: Job) -> Iterator[Completion]:
        features = None
        self._cache.slot = i
        taps, hidden = self._target.read(
            torch.tensor([job.tokens], device=self._target.device), self._taps, self._cache
        )
        if self._keeps:
            width = taps.shape[-1] + hidden.shape[-1]
            features = torch.zeros(self._n_positions, width, dtype=torch.float16, device=self._target.device)
            features[: len(job.tokens)] = _float16(taps[0], hidden[0])
        slot = _Slot(index, job, list(job.tokens), np.random.default_rng([job.seed, 3]), features)
        self._slots[i] = slot
        yield from self._emit(i, slot, choose(self._target.logits(hidden[:, -1]), [slot])[0])

    def _step(self) -> Iterator[Completion]:
        # Idle slots compute along, at position 0: the batch keeps its shape.
        tokens = torch.tensor([s.tokens[-1] if s else 0 for s in self._slots], device=self._target.device)
        lengths = torch.tensor([len(s.tokens) - 1 if s else 0 for s in self._slots], device=self._target.device)
        if not any(self._slots):
            return
        taps, hidden = self._target.step(tokens, lengths, self._taps, self._cache)
        features = _float16(taps, hidden)[:, 0]
        chosen = choose(self._target.logits(hidden[:, 0]), self._slots)
        for i, slot in enumerate(self._slots):
            if slot is not None:
                if slot.features is not None:
                    slot.features[len(slot.tokens) - 1] = features[i]
                yield from self._emit(i, slot, chosen[i])

    def _emit(self, i: int, slot: _Slot, token: int) -> Iterator[Completion]:
        slot.tokens.append(token)
        ended = token in self._ends
        if ended or len(slot.tokens) - len(slot.job.tokens) >= slot.job.max_tokens:
            self._slots[i] = None
            features = None if slot.features is None else slot.features[: len(slot.tokens)].cpu().numpy()
            yield Completion(slot.index, slot.tokens, ended, features)


def choose(logits: Tensor, slots: Sequence[_Slot | None]) -> list[int]:
    """A token for each row of logits [B, V]: the best at temperature 0, else sampled; anything for idle slots."""
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    rows = [i for i, slot in enumerate(slots) if slot is not None and slot.job.temperature > 0]
    if rows:
        n_best = max(slots[i].job.top_k for i in rows)  # type: ignore[union-attr]
        best = logits[rows].topk(min(n_best, logits.shape[-1]))
        for i, values, tokens in zip(rows, best.values.double().cpu().numpy(), best.indices.tolist(), strict=True):
            slot = slots[i]
            assert slot is not None
            chosen[i] = tokens[_draw(values[: slot.job.top_k], slot.job, slot.rng)]
    return chosen


def _draw(values: npt.NDArray[np.float64], job: Job, rng: np.random.Generator) -> int:
    """Place of a token among the best, whose logits fall."""
    p = np.exp((values - values[0]) / job.temperature)
    p /= p.sum()
    n_kept = int(np.searchsorted(np.cumsum(p), job.top_p)) + 1
    return int(rng.choice(n_kept, p=p[:n_kept] / p[:n_kept].sum()) if n_kept < len(p) else rng.choice(len(p), p=p))


def _float16(taps: Tensor, hidden: Tensor) -> Tensor:
    """The first token's activations are a thousand times the others', beyond float16 in some models."""
    return torch.cat([taps, hidden], dim=-1).clamp(-FLOAT16_MAX, FLOAT16_MAX).half()
