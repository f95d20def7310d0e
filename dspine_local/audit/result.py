"""What an audit found: by batch size, and by where in the context."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

# Positions that share a verdict. llama.cpp rounds the cells that attention reads up to this number, and its kernels are
# chosen by what comes out.
BLOCK = 256

Range = tuple[int, int]  # a first position, and the one behind the last


@dataclass(frozen=True)
class BlockCount:
    """Rows at positions ``first`` to ``first + BLOCK - 1``, and how many had the very bits of the reference."""

    first: int
    rows: int
    identical: int


@dataclass(frozen=True)
class BatchResult:
    """Decodes of ``batch_size`` tokens against one by one.

    ``max_abs_diff`` is of all logits; ``median_abs_diff`` the median over rows of a row's median. Both are None where a
    logit was not finite. ``flip_margins``: of each row whose most likely token changed, by how much the reference
    preferred its own, in rising order.
    """

    batch_size: int
    rows: int
    identical: int
    max_abs_diff: float | None
    median_abs_diff: float | None
    flip_margins: tuple[float, ...]
    blocks: tuple[BlockCount, ...]

    @property
    def n_draft(self) -> int:
        """The draft length that is verified in such batches."""
        return self.batch_size - 1

    @property
    def is_exact(self) -> bool:
        """Whether all measured rows were identical; one whole batch at least."""
        return self.rows >= self.batch_size and self.identical == self.rows

    @property
    def flips_per_1000(self) -> float:
        """Changed choices per 1,000 tokens."""
        return 1000 * len(self.flip_margins) / self.rows if self.rows else 0.0

    @cached_property
    def exact_ranges(self) -> list[Range]:
        """Positions where such a batch is exact, one range per block, which no batch may cross.

        A block that was not measured counts as its measured neighbours if both are exact; beyond the last measured one
        nothing is known.
        """
        verdicts = {b.first: b.identical == b.rows for b in self.blocks if b.rows >= self.batch_size}
        exact = [first for first, yes in sorted(verdicts.items()) if yes]
        for (first, before), (last, after) in pairwise(sorted(verdicts.items())):
            if before and after:
                exact += range(first + BLOCK, last, BLOCK)
        return [(first, first + BLOCK) for first in sorted(exact)]

    def joined(self, other: BatchResult) -> BatchResult:
        """Both measurements as one; the median is that of the longer one."""
        counts = {block.first: block for block in self.blocks}
        for block in other.blocks:
            known = counts.get(block.first, BlockCount(block.first, 0, 0))
            counts[block.first] = BlockCount(block.first, known.rows + block.rows, known.identical + block.identical)
        largest = [d for d in (self.max_abs_diff, other.max_abs_diff) if d is not None]
        return BatchResult(
            batch_size=self.batch_size,
            rows=self.rows + other.rows,
            identical=self.identical + other.identical,
            max_abs_diff=max(largest) if len(largest) == 2 else None,
            median_abs_diff=max((self, other), key=lambda result: result.rows).median_abs_diff,
            flip_margins=tuple(sorted((*self.flip_margins, *other.flip_margins))),
            blocks=tuple(counts[first] for first in sorted(counts)),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with what follows from them."""
        return {
            "batch_size": self.batch_size,
            "n_draft": self.n_draft,
            "rows": self.rows,
            "identical": self.identical,
            "exact": self.is_exact,
            "max_abs_diff": self.max_abs_diff,
            "median_abs_diff": self.median_abs_diff,
            "flips_per_1000": self.flips_per_1000,
            "flip_margins": list(self.flip_margins),
            "blocks": [vars(block) for block in self.blocks],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BatchResult:
        """The opposite of ``to_json``. Raises ValueError, KeyError, TypeError for what is none."""
        blocks = tuple(
            BlockCount(*(_count(b[name]) for name in ("first", "rows", "identical"))) for b in values["blocks"]
        )
        result = cls(
            batch_size=_count(values["batch_size"]),
            rows=_count(values["rows"]),
            identical=_count(values["identical"]),
            max_abs_diff=_number(values["max_abs_diff"]),
            median_abs_diff=_number(values["median_abs_diff"]),
            flip_margins=tuple(float(margin) for margin in values["flip_margins"]),
            blocks=blocks,
        )
        sums = (sum(b.rows for b in blocks), sum(b.identical for b in blocks))
        if result.batch_size < 2 or sums != (result.rows, result.identical) or any(b.first % BLOCK for b in blocks):
            raise ValueError(f"batch size {result.batch_size} with {sums[0]} rows in blocks, {result.rows} in all")
        return result


@dataclass(frozen=True)
class AuditResult:
    """``n_tokens`` were decoded one by one; ``complete`` is False where the time given was not enough."""

    n_tokens: int
    complete: bool
    batches: tuple[BatchResult, ...]

    @property
    def n_flips(self) -> int:
        """Changed choices, of all batch sizes."""
        return sum(len(batch.flip_margins) for batch in self.batches)

    @property
    def exact_lengths(self) -> tuple[int, ...]:
        """Draft lengths of which every measured row was identical."""
        return tuple(batch.n_draft for batch in self.batches if batch.is_exact)

    def joined(self, other: AuditResult) -> AuditResult:
        """Both as one: what either found not to be exact is not."""
        found = {batch.batch_size: batch for batch in self.batches}
        for batch in other.batches:
            known = found.get(batch.batch_size)
            found[batch.batch_size] = batch if known is None else known.joined(batch)
        batches = tuple(found[size] for size in sorted(found))
        return AuditResult(self.n_tokens + other.n_tokens, self.complete or other.complete, batches)

    def ranges(self, n_draft: int) -> list[list[Range]]:
        """For each draft length from 1 to ``n_draft``, the positions where it is exact."""
        by_length = {batch.n_draft: batch.exact_ranges for batch in self.batches}
        return [by_length.get(length, []) for length in range(1, n_draft + 1)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "n_tokens": self.n_tokens,
            "complete": self.complete,
            "exact_lengths": list(self.exact_lengths),
            "n_flips": self.n_flips,
            "batches": [batch.to_json() for batch in self.batches],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AuditResult:
        """The opposite of ``to_json``. Raises ValueError, KeyError, TypeError for what is none."""
        batches = tuple(BatchResult.from_json(batch) for batch in values["batches"])
        if not isinstance(values["complete"], bool):
            raise TypeError(f"complete = {values['complete']!r}")
        return cls(_count(values["n_tokens"]), values["complete"], batches)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r}, expected a count")
    return value


def _number(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r}, expected a number")
    return float(value)
