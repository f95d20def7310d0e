"""Draws training batches: sequences, and anchors inside their answers. Every batch follows from seed and step alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspine_local.train.data import Conversation
from dspine_local.train.features import Row
from dspine_local.train.live import Features

HELD_OUT_EVERY = 48


@dataclass
class Batch:
    """Blocks of B sequences; A anchors each, S slots per block.

    ``labels`` and ``teacher`` are of slots 1 .. S-1; ``weight`` is 0 where there is no label.
    """

    features: Tensor  # [B, N, T * D], every tap of unit size
    positions: Tensor  # [B, N]
    anchors: Tensor  # [B, A]
    anchor_tokens: Tensor  # [B, A]
    labels: Tensor  # [B, A, S-1]
    teacher: Tensor  # [B, A, S-1, D], final hidden states that the labels were chosen from
    weight: Tensor  # [B, A, S-1]

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(**{name: value.to(device, non_blocking=True) for name, value in vars(self).items()})


def split(features: Features) -> tuple[list[int], list[int]]:
    """Numbers of the sequences to train on and of those held out, each with at least two answer tokens."""
    usable = [i for i, s in enumerate(features.sequences) if s.n_answer >= 3]
    held_out = usable[::HELD_OUT_EVERY]
    chosen = set(held_out)
    return [i for i in usable if i not in chosen], held_out


def epoch_order(indices: Sequence[int], seed: int, epoch: int) -> list[int]:
    """The epoch's order of sequences."""
    return [indices[i] for i in np.random.default_rng([seed, 1, epoch]).permutation(len(indices))]


def draw_anchors(sequence: Conversation, n_anchors: int, rng: np.random.Generator) -> list[int]:
    """Different positions inside the answer with at least one token behind, in order."""
    first, last = sequence.answer_start, len(sequence.tokens) - 2
    n_available = last - first + 1
    chosen = rng.choice(n_available, size=min(n_anchors, n_available), replace=False)
    return sorted(int(i) + first for i in chosen)


def collate(
    rows: Sequence[Row], anchors: Sequence[Sequence[int]], n_slots: int, scales: Sequence[float], decay: float
) -> Batch:
    """One batch of sequences with their anchors; missing anchors repeat the last one with weight 0.

    Args:
        decay: Slot j weighs exp(-(j - 1) / decay).
    """
    width = rows[0].hidden.shape[1]
    n_context = max(max(places) for places in anchors)
    n_anchors = max(len(places) for places in anchors)
    n_batch, n_labels = len(rows), n_slots - 1
    features = np.zeros((n_batch, n_context, len(scales) * width), dtype=np.float32)
    teacher = np.zeros((n_batch, n_anchors, n_labels, width), dtype=np.float32)
    places = np.zeros((n_batch, n_anchors), dtype=np.int64)
    tokens = np.zeros((n_batch, n_anchors, n_slots), dtype=np.int64)
    weight = np.zeros((n_batch, n_anchors, n_labels), dtype=np.float32)
    by_slot = np.exp(-np.arange(n_labels, dtype=np.float32) / decay)
    factor = np.repeat(1.0 / np.asarray(scales, dtype=np.float32), width)
    for b, (row, chosen) in enumerate(zip(rows, anchors, strict=True)):
        n = max(chosen)
        features[b, :n] = row.taps[:n].astype(np.float32) * factor
        places[b] = [*chosen, *[chosen[-1]] * (n_anchors - len(chosen))]
        ids = np.asarray(row.sequence.tokens)
        for a, place in enumerate(chosen):
            part = ids[place : place + n_slots]
            tokens[b, a, : len(part)] = part
            weight[b, a, : len(part) - 1] = by_slot[: len(part) - 1]
            # Position p's hidden state is what chose token p + 1.
            teacher[b, a, : len(part) - 1] = row.hidden[place : place + len(part) - 1]
        tokens[b, len(chosen) :, 0] = ids[chosen[-1]]
    return Batch(
        features=torch.from_numpy(features),
        positions=torch.arange(n_context).expand(n_batch, -1),
        anchors=torch.from_numpy(places),
        anchor_tokens=torch.from_numpy(tokens[:, :, 0].copy()),
        labels=torch.from_numpy(tokens[:, :, 1:].copy()),
        teacher=torch.from_numpy(teacher),
        weight=torch.from_numpy(weight),
    )
