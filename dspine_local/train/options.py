"""Options of the training stage, and the schedules that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dspine_local.checks import UINT32_MAX, need_choice, need_flag, need_integer, need_number, need_positive
from dspine_local.train.losses import Objective

OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How a drafter is trained. The defaults are what the shipped drafter was trained with.

    Args:
        n_steps: Optimizer steps.
        n_sequences: Sequences per step.
        n_anchors: Blocks of each.
        learning_rate: Its peak, after the warmup; a cosine takes it to a twentieth.
        optimizer: ``"adamw"``, or ``"muon"`` for the matrices of the layers and AdamW for the rest.
        decay: Slot j weighs exp(-(j - 1) / decay).
        short_share: Part of the steps with blocks of half the length: later slots cost as much and matter less. For
            causal drafters only.
        average: Share of the old weights kept in the running average that is evaluated and exported.
        replacement: Probability, at first, that a block is told its true predecessors.
        eval_every: Steps between measurements of the acceptance length.
        n_held_out: Held-out greedy answers that it is measured on.
    """

    n_steps: int = 5000
    n_sequences: int = 6
    n_anchors: int = 32
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.01
    max_norm: float = 1.0
    optimizer: str = "adamw"
    decay: float = 2.5
    short_share: float = 0.75
    average: float = 0.999
    replacement: float = 0.5
    l1_from: float = 0.6
    from_target: bool = True
    eval_every: int = 500
    save_every: int = 100
    n_held_out: int = 32
    seed: int = 0
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        for name in ("n_steps", "n_sequences", "n_anchors", "eval_every", "save_every", "n_held_out"):
            need_integer(name, getattr(self, name), 1)
        need_integer("warmup", self.warmup, 0)
        need_integer("seed", self.seed, 0, UINT32_MAX)
        need_choice("optimizer", self.optimizer, OPTIMIZERS)
        for name in ("learning_rate", "max_norm", "decay"):
            need_positive(name, getattr(self, name))
        for name in ("weight_decay", "l1_from"):
            need_number(name, getattr(self, name), 0.0)
        for name in ("short_share", "average", "replacement"):
            need_number(name, getattr(self, name), 0.0, 1.0)
        need_flag("from_target", self.from_target)

    def rate(self, step: int) -> float:
        """Learning rate of a step as a share of its peak."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.n_steps - self.warmup)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def replacement_probability(self, step: int) -> float:
        """Held for the first sixth, then falling to zero at a third."""
        done = step / self.n_steps
        return self.replacement * min(1.0, max(0.0, 2 - 6 * done))

    def l1_share(self, step: int) -> float:
        """Zero up to ``l1_from``, then rising to one within a fifth."""
        return min(1.0, max(0.0, (step / self.n_steps - self.l1_from) / 0.2))

    def average_share(self, step: int) -> float:
        """Share of the old average: small at first, so that it does not remember the beginning."""
        return min(self.average, (1 + step) / (10 + step))
