"""Acceptance length of a drafter on held-out answers, in PyTorch: the same rounds as the engine's, many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspine_local.train.batch import collate
from dspine_local.train.features import Row
from dspine_local.train.model import BlockOutput, Drafter


@dataclass(frozen=True)
class Acceptance:
    """``length`` is emitted tokens per round; ``by_position[i]`` how often draft token i was accepted."""

    length: float
    n_rounds: int
    by_position: tuple[float, ...]


@torch.no_grad()
def greedy_draft(drafter: Drafter, out: BlockOutput, head: Tensor, anchors: Tensor, n_draft: int) -> Tensor:
    """Draft tokens [B, n_draft] of one block per sequence (A = 1). Source: docs/method.md, candidates."""
    hidden = out.hidden[:, 0, 1 : n_draft + 1]
    logits = (hidden @ head.T).float()
    if not drafter.shape.injection:
        return logits.argmax(dim=-1)
    candidates = logits.topk(drafter.shape.top_k, dim=-1).indices
    chosen, previous = [], anchors
    for j in range(n_draft):
        u = drafter.refine(out.pre[-1][:, 0, j + 1], out.readouts[-1][:, 0, j], drafter.code(previous))
        scores = torch.einsum("bd,bkd->bk", u, head[candidates[:, j]])
        previous = candidates[:, j].gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
        chosen.append(previous)
    return torch.stack(chosen, dim=1)


@torch.no_grad()
def measure_acceptance(
    drafter: Drafter,
    rows: Sequence[Row],
    scales: Sequence[float],
    embedding: Tensor,
    head: Tensor,
    *,
    max_tokens: int = 128,
    n_draft: int | None = None,
) -> Acceptance:
    """Follow greedy answers round by round, as the engine would at temperature 0.

    Args:
        rows: Held-out sequences whose answers are the target's greedy ones.
        max_tokens: Answer tokens of each that are followed.
    """
    device = head.device
    n_draft = n_draft or drafter.shape.block_size - 1
    ends = [min(len(row.sequence.tokens), row.sequence.answer_start + max_tokens) for row in rows]
    last = [[max(row.sequence.answer_start, end - 2)] for row, end in zip(rows, ends, strict=True)]
    batch = collate(rows, last, 2, scales, 1.0).to(device)
    context = drafter.context(batch.features, batch.positions)
    places = [row.sequence.answer_start for row in rows]
    n_rounds = n_emitted = 0
    accepted_at, drafted_at = [0] * n_draft, [0] * n_draft
    while True:
        running = [b for b in range(len(rows)) if places[b] < ends[b] - 1]
        if not running:
            break
        which = torch.tensor(running, device=device)
        anchors = torch.tensor([rows[b].sequence.tokens[places[b]] for b in running], device=device)
        out = drafter(
            [(k[which], v[which]) for k, v in context],
            torch.tensor([[places[b]] for b in running], device=device),
            embedding[anchors][:, None],
            embedding[drafter.shape.mask_token_id],
            drafter.code(anchors)[:, None] if drafter.shape.injection else None,
            n_slots=n_draft + 1 if drafter.shape.causal else None,
        )
        drafts = greedy_draft(drafter, out, head, anchors, n_draft).tolist()
        for b, draft in zip(running, drafts, strict=True):
            truth = rows[b].sequence.tokens[places[b] + 1 : ends[b]]
            n_accepted = 0
            for i, token in enumerate(draft[: len(truth) - 1]):
                drafted_at[i] += 1
                if token != truth[i]:
                    break
                accepted_at[i] += 1
                n_accepted += 1
            n_rounds += 1
            n_emitted += n_accepted + 1
            places[b] += n_accepted + 1
    rates = tuple(a / d if d else 0.0 for a, d in zip(accepted_at, drafted_at, strict=True))
    return Acceptance(n_emitted / max(1, n_rounds), n_rounds, rates)
