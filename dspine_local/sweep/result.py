"""What a sweep measured, type by type and prompt by prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class PromptResult:
    """One answer. ``emitted``: tokens of its rounds. Seconds are of all its rounds together."""

    category: str
    rounds: int
    emitted: int
    draft_s: float
    verify_s: float


@dataclass(frozen=True)
class TypeResult:
    """A drafter in one type.

    Args:
        type: The converter's name.
        file: In the sweep's folder.
        n_bytes: Of the file.
        types: Tensors by the type that they really have.
        prompts: In the order of the prompt set, the same for every type; answers without a round left out of none.
    """

    type: str
    file: str
    n_bytes: int
    types: Mapping[str, int]
    prompts: tuple[PromptResult, ...]

    @property
    def length(self) -> float:
        """Acceptance length: mean over categories of emitted tokens per round."""
        return acceptance_length(self.prompts)

    @property
    def draft_s(self) -> float:
        """Seconds of one draft, the median over answers."""
        return median(p.draft_s / p.rounds for p in self.prompts if p.rounds)

    @property
    def draft_share(self) -> float:
        """A draft's time over that of the decode that verifies it, the median over answers."""
        return draft_share(self.prompts)

    @property
    def fallbacks(self) -> int:
        """Matrices in another type than asked for."""
        return sum(n for name, n in self.types.items() if name not in (self.type, "f32"))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TypeResult:
        """The opposite of ``asdict``. Raises KeyError, TypeError, ValueError for what is none."""
        prompts = tuple(PromptResult(**prompt) for prompt in values["prompts"])
        if any(p.rounds < 0 or p.emitted < p.rounds or (p.rounds and p.verify_s <= 0) for p in prompts):
            raise ValueError(f"impossible counts for {values['type']}")
        return cls(str(values["type"]), str(values["file"]), int(values["n_bytes"]), dict(values["types"]), prompts)


@dataclass(frozen=True)
class Sweep:
    """``about``: all that the figures depend on."""

    about: Mapping[str, Any]
    results: tuple[TypeResult, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def acceptance_length(prompts: Sequence[PromptResult]) -> float:
    """Mean over categories of emitted tokens per round; 1.0 without a round."""
    lengths = []
    for category in dict.fromkeys(p.category for p in prompts):
        some = [p for p in prompts if p.category == category]
        n_rounds = sum(p.rounds for p in some)
        if n_rounds:
            lengths.append(sum(p.emitted for p in some) / n_rounds)
    return sum(lengths) / len(lengths) if lengths else 1.0


def draft_share(prompts: Sequence[PromptResult]) -> float:
    """A draft's time over that of the decode that verifies it, the median over answers; 0.0 without a round.

    Both are measured in the same rounds, so that a busy machine slows them alike.
    """
    shares = [p.draft_s / p.verify_s for p in prompts if p.rounds]
    return median(shares) if shares else 0.0


def need_spread(categories: Sequence[str]) -> None:
    """Raises ValueError where no spread between prompts can be told: none, or one of a category."""
    if not categories:
        raise ValueError("no prompts, expected at least two per category")
    alone = [category for category in dict.fromkeys(categories) if categories.count(category) == 1]
    if alone:
        raise ValueError(
            f"one prompt of {', '.join(alone)}, expected at least two per category: one says nothing about the spread"
        )
