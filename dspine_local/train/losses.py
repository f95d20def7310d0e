"""The training objective (docs/training.md): against labels, the teacher's distribution and the tokens' codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from dspine_local.train.batch import Batch
from dspine_local.train.model import EPS, Drafter


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Weights of the parts of the loss; ``l1`` counts in the last part of training only.

    Args:
        ce: Cross-entropy against the label.
        kl: Against the teacher's distribution.
        l1: Distance of the two distributions, which is what acceptance depends on.
        refined: The same for the scores of the candidates behind the true predecessor.
        align: Distance of the readouts from the label's code.
        n_frequent: Frequent tokens that every step's softmax has.
        n_sampled: Other tokens drawn for each step.
    """

    ce: float = 0.5
    kl: float = 0.5
    l1: float = 0.5
    refined: float = 1.0
    align: float = 0.1
    n_frequent: int = 3072
    n_sampled: int = 1024


class TokenSubset:
    """The part of the vocabulary that one step's softmax runs over.

    Sampled tokens stand for all those not drawn: their logits are raised by log(others / drawn).
    """

    def __init__(
        self, frequent: Tensor, rare: Tensor, labels: Tensor, n_sampled: int, rng: np.random.Generator
    ) -> None:
        n_sampled = min(n_sampled, len(rare))
        drawn = rare[torch.from_numpy(rng.choice(len(rare), size=n_sampled, replace=False)).to(rare.device)]
        known = torch.cat([frequent, labels.flatten()]).unique()  # type: ignore[no-untyped-call]
        drawn = drawn[~torch.isin(drawn, known)]
        self.tokens = torch.cat([known, drawn])
        self.correction = torch.zeros(len(self.tokens), device=known.device)
        if len(drawn):
            n_others = len(frequent) + len(rare) - len(known)
            self.correction[len(known) :] = math.log(max(1.0, n_others / len(drawn)))
        self._known = known

    def index(self, labels: Tensor) -> Tensor:
        """Places of labels in ``tokens``."""
        return torch.searchsorted(self._known, labels)


def frequent_tokens(counts: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n most frequent tokens, sorted, and all others."""
    order = counts.argsort(descending=True, stable=True)
    return order[:n].sort().values, order[n:].sort().values


def token_losses(logits: Tensor, teacher: Tensor, index: Tensor, objective: Objective, l1_share: float) -> Tensor:
    """Loss of every row. ``logits`` and ``teacher`` [n, V'], the second as
    probabilities; ``index`` [n] the label's place.

    KL is given up to the teacher's entropy, which has no gradient.
    """
    log_q = F.log_softmax(logits, dim=-1)
    loss: Tensor = -objective.ce * log_q.gather(1, index[:, None])[:, 0]
    loss = loss - objective.kl * torch.linalg.vecdot(teacher, log_q)
    if l1_share > 0:
        loss = loss + l1_share * objective.l1 * (teacher - log_q.exp()).abs().sum(dim=-1)
    return loss


@dataclass
class Parts:
    """The whole loss, and its parts for the log."""

    total: Tensor
    values: dict[str, float]


def block_loss(
    drafter: Drafter,
    batch: Batch,
    embedding: Tensor,
    head: Tensor,
    subset: TokenSubset,
    objective: Objective,
    *,
    l1_share: float = 0.0,
    replaced: Tensor | None = None,
) -> Parts:
    """The objective on one batch.

    Args:
        embedding: The target's token embedding [V, D]; ``head`` its output matrix. Both stay as they are.
        l1_share: How much of the L1 part counts, 0 to 1.
        replaced: Blocks [B, A] that are told the true predecessors in the first three layers.
    """
    shape = drafter.shape
    n_slots = batch.labels.shape[2] + 1
    anchor_codes = drafter.code(batch.anchor_tokens) if shape.injection else None
    label_codes = drafter.code(batch.labels) if shape.injection else None
    out = drafter(
        drafter.context(batch.features, batch.positions),
        batch.anchors,
        embedding[batch.anchor_tokens],
        embedding[shape.mask_token_id],
        anchor_codes,
        n_slots=n_slots,
        known_codes=label_codes,
        replaced=replaced,
        n_replaced_layers=3,
    )
    used = batch.weight.flatten() > 0
    weight = batch.weight.flatten()[used]
    weight = weight / weight.sum()
    labels = batch.labels.flatten()[used]
    index = subset.index(labels)
    part = head[subset.tokens]
    with torch.no_grad():
        teacher_hidden = batch.teacher.flatten(0, 2)[used]
        teacher = torch.softmax((teacher_hidden @ part.T).float() + subset.correction, dim=-1)
    hidden = out.hidden[:, :, 1:].flatten(0, 2)[used]
    logits = (hidden @ part.T).float() + subset.correction
    base = (token_losses(logits, teacher, index, objective, l1_share) * weight).sum()
    with torch.no_grad():
        right = (logits.argmax(dim=-1) == index).float()
        values = {"loss_base": base.item(), "top1": (right * weight).sum().item()}
    total = base
    if shape.injection:
        assert anchor_codes is not None
        assert label_codes is not None
        predecessors = torch.cat([anchor_codes[:, :, None], label_codes[:, :, :-1]], dim=2)
        u = drafter.refine(
            out.pre[-1][:, :, 1:].flatten(0, 2)[used],
            out.readouts[-1].flatten(0, 2)[used],
            predecessors.flatten(0, 2)[used],
        )
        with torch.no_grad():
            candidates = logits.topk(min(shape.top_k, logits.shape[1]), dim=-1).indices
            found = (candidates == index[:, None]).any(dim=-1)
            candidates[~found, -1] = index[~found]
            place = (candidates == index[:, None]).float().argmax(dim=-1)
            narrowed = teacher.gather(1, candidates)
            narrowed = narrowed / narrowed.sum(dim=-1, keepdim=True).clamp_min(EPS)
        # One product with all of the subset is cheaper than picking K rows of it for every slot.
        scores = (u @ part.T).gather(1, candidates).float()
        refined = (token_losses(scores, narrowed, place, objective, l1_share) * weight).sum()
        align = torch.zeros((), device=weight.device)
        target_codes = drafter.transfer_codes[labels]
        for il, y in enumerate(out.post):
            f = drafter.injection.read(il, y[:, :, 1:].flatten(0, 2)[used])
            align = align + ((1 - F.cosine_similarity(f, target_codes, dim=-1)) * weight).sum() / shape.n_layers
        total = total + objective.refined * refined + objective.align * align
        with torch.no_grad():
            best = ((scores.argmax(dim=-1) == place) & found).float()
            values |= {
                "loss_refined": refined.item(),
                "align": align.item(),
                "recall": (found.float() * weight).sum().item(),
                "top1_refined": (best * weight).sum().item(),
            }
    values["loss"] = total.item()
    return Parts(total, values)
