"""Features computed when they are needed, by the target in PyTorch: nothing is stored but the answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from dspine_local.train.data import Conversation, complete_shards, read_shard, shard_named
from dspine_local.train.features import Row, tap_sizes
from dspine_local.train.torch_target import FLOAT16_MAX, TorchTarget
from dspine_local.train.weights import TargetWeights

# Conversations that the taps' sizes are taken from, and how many go through the target at once.
N_FOR_SCALES = 64
N_AT_ONCE = 16


class Features(Protocol):
    """What training reads: conversations, numbered, and the features of any of them."""

    shards: list[str]
    taps: list[int]
    scales: list[float]

    @property
    def sequences(self) -> list[Conversation]:
        """All conversations, in the order of their numbers."""

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Conversations with their features."""


class LiveFeatures:
    """Features by a forward pass of the target.

    Raises:
        FileNotFoundError: There is no data.
        ValueError: The target has no PyTorch forward here.
    """

    def __init__(
        self,
        data: Path,
        target: TargetWeights,
        taps: Sequence[int],
        device: torch.device,
        shards: Sequence[str] | None = None,
    ) -> None:
        self.shards = [path.stem for path in complete_shards(data)] if shards is None else list(shards)
        if not self.shards:
            raise FileNotFoundError(f"no data in '{data}', expected shards of the data stage")
        self.taps = list(taps)
        self._sequences = [
            c for name in self.shards for c in read_shard(shard_named(data, name), target.shape("token_embd.weight")[0])
        ]
        self._target = TorchTarget(target, str(device))
        rows = self.rows(range(min(N_FOR_SCALES, len(self._sequences))))
        self.scales = tap_sizes(rows, len(self.taps))

    @property
    def sequences(self) -> list[Conversation]:
        """All conversations, in the order of their numbers."""
        return self._sequences

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Conversations with their features."""
        rows: list[Row] = []
        for first in range(0, len(indices), N_AT_ONCE):
            chosen = [self._sequences[i] for i in indices[first : first + N_AT_ONCE]]
            tokens = np.zeros((len(chosen), max(len(c.tokens) for c in chosen)), dtype=np.int64)
            for b, conversation in enumerate(chosen):
                tokens[b, : len(conversation.tokens)] = conversation.tokens
            taps, hidden = (
                part.float().clamp(-FLOAT16_MAX, FLOAT16_MAX).half().cpu().numpy()
                for part in self._target.read(torch.from_numpy(tokens).to(self._target.device), self.taps)
            )
            rows += [Row(c, taps[b, : len(c.tokens)], hidden[b, : len(c.tokens)]) for b, c in enumerate(chosen)]
        return rows
