"""Decodes the same tokens one by one and in batches, and compares the logits bit by bit.

A prefix is read as a prompt is. Behind it come the reference, one token at a time, and then, for every batch size and
from the same prefix again, the reference's tokens in batches of that size: each batch follows what earlier ones of its
size left in the cache, as in verification when every draft is accepted. No batch crosses a block of positions
(``BLOCK``): the tokens before a block's end that do not fill one are decoded one by one, and not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dspine_local import _native
from dspine_local.audit.cases import Case
from dspine_local.audit.result import BLOCK, AuditResult, BatchResult, BlockCount
from dspine_local.errors import BackendError

# Rows of the reference that are kept at a time; a longer answer is read again from its beginning.
SEGMENT = 64
# Prompt tokens of one decode where time is short.
SMALL_CHUNK = 32

Row = npt.NDArray[np.float32]  # logits of a token, [n_vocab]
Rows = npt.NDArray[np.float32]  # [n_tokens, n_vocab]
Report = Callable[[int, int, str], None]


def measure(
    target: _native.Target,
    cases: Iterable[Case],
    sizes: Sequence[int],
    *,
    budget_s: float | None = None,
    report: Report = lambda _done, _total, _label: None,
) -> AuditResult:
    """Audit the target's first sequence, which is empty afterwards.

    Args:
        sizes: Batch sizes, 2 or more; the target must give as many rows of logits.
        budget_s: Stop after so many seconds, and leave out sizes that were found inexact. None: all of it.
        report: Is told decodes done, decodes in all (with a budget, tenths of seconds), and where.
    Raises:
        BackendError: A decode failed, or gave logits that are not numbers.
    """
    audit = _Audit(target, sizes, budget_s)
    planned = list(cases) if budget_s is None else []
    per_token = 1 + sum(1 / size for size in sizes)
    total = sum(case.n_tokens * per_token for case in planned)
    done = 0.0
    try:
        for case in planned or cases:

            def tick(n_decodes: int, label: str = case.label, done: float = done) -> None:
                spent, n_all = (int(done + n_decodes), int(total)) if budget_s is None else audit.spent()
                report(min(spent, n_all), n_all, label)

            audit.run(case, tick)
            done += case.n_tokens * per_token
    except _OutOfTimeError:
        audit.complete = False
    finally:
        target.truncate(0, 0)
    return audit.result()


class _OutOfTimeError(Exception):
    """The budget is spent."""


@dataclass
class _Tally:
    """Of one batch size."""

    max_diff: float = 0.0
    medians: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    blocks: dict[int, list[int]] = field(default_factory=dict)  # first position: rows, identical ones

    def add(self, position: int, row: Row, reference: Row) -> None:
        same = bool(np.array_equal(row.view(np.int32), reference.view(np.int32)))
        counts = self.blocks.setdefault(position // BLOCK * BLOCK, [0, 0])
        counts[0] += 1
        counts[1] += same
        if same:
            self.medians.append(0.0)
            return
        with np.errstate(invalid="ignore"):  # the same infinity in both
            diff = np.nan_to_num(np.abs(row - reference), nan=0.0, posinf=np.inf)
        self.max_diff = max(self.max_diff, float(diff.max()))
        self.medians.append(float(np.median(diff)))
        chosen, preferred = int(row.argmax()), int(reference.argmax())
        if chosen != preferred:
            self.margins.append(float(reference[preferred] - reference[chosen]))

    @property
    def is_inexact(self) -> bool:
        return any(identical < rows for rows, identical in self.blocks.values())

    def result(self, size: int) -> BatchResult:
        median = float(np.median(self.medians)) if self.medians else 0.0
        return BatchResult(
            batch_size=size,
            rows=sum(rows for rows, _ in self.blocks.values()),
            identical=sum(identical for _, identical in self.blocks.values()),
            max_abs_diff=self.max_diff if np.isfinite(self.max_diff) else None,
            median_abs_diff=median if np.isfinite(median) else None,
            flip_margins=tuple(sorted(self.margins)),
            blocks=tuple(BlockCount(first, *counts) for first, counts in sorted(self.blocks.items())),
        )


class _Audit:
    def __init__(self, target: _native.Target, sizes: Sequence[int], budget_s: float | None) -> None:
        self.target = target
        self.tallies = {size: _Tally() for size in sizes}
        self.sizes = list(sizes)
        self.budget_s = budget_s
        self.start = time.monotonic()
        self.n_tokens = 0
        self.complete = True
        self.prefix: list[int] = []  # what the cache begins with, and
        self.state = b""  # a recurrent target's state there
        self.n_decodes = 0
        self.tick: Callable[[int], None] = lambda _n_decodes: None

    def spent(self) -> tuple[int, int]:
        """Tenths of seconds: gone, and in all."""
        assert self.budget_s is not None
        return int(10 * (time.monotonic() - self.start)), int(10 * self.budget_s)

    def result(self) -> AuditResult:
        return AuditResult(self.n_tokens, self.complete, tuple(t.result(size) for size, t in self.tallies.items()))

    def run(self, case: Case, tick: Callable[[int], None]) -> None:
        """A case, in segments of as many rows as are kept; ``tick`` is told decodes."""
        self.n_decodes, self.tick = 0, tick
        tokens = list(case.prefix)
        pending: int | None = None  # the greedy token that follows
        for first in range(0, case.n_tokens, SEGMENT):
            if not self.sizes:
                return
            n = min(SEGMENT, case.n_tokens - first)
            logits = self._read(tokens)
            n_prefix = len(tokens)
            fed = list(case.text[first : first + n])
            pending = int(logits.argmax()) if pending is None else pending
            reference: list[Row] = []
            for i in range(n):
                if i == len(fed):  # greedy, up to the answer's end
                    if self.target.is_end_of_generation(pending):
                        break
                    fed.append(pending)
                reference.append(self._decode(fed[i : i + 1])[0])
                pending = int(reference[-1].argmax())
            self.n_tokens += len(fed)
            for size in list(self.sizes):
                self._go_back(n_prefix)
                self._compare(size, n_prefix, fed, reference)
            tokens += fed
            if len(fed) < n:
                return

    def _read(self, tokens: list[int]) -> Row:
        """Row behind the tokens, float32 [n_vocab]. Goes on from the last prefix where that is their beginning."""
        n_kept = len(self.prefix)
        if n_kept < len(tokens) and tokens[:n_kept] == self.prefix:
            self._go_back(n_kept)
        else:
            n_kept = 0
            self.target.truncate(0, 0)
        self.prefix = []
        chunk = self.target.n_batch if self.budget_s is None else min(SMALL_CHUNK, self.target.n_batch)
        for first in range(n_kept, len(tokens), chunk):
            logits = self._decode(tokens[first : first + chunk], 1)
        self.prefix = list(tokens)
        self.state = self.target.save_recurrent(0) if self.target.is_recurrent else b""
        return np.asarray(logits[0])

    def _compare(self, size: int, n_prefix: int, fed: list[int], reference: list[Row]) -> None:
        i = 0
        while len(fed) - i >= size:
            position = n_prefix + i
            if position // BLOCK != (position + size - 1) // BLOCK:
                self._decode(fed[i : i + 1])
                i += 1
                continue
            rows = self._decode(fed[i : i + size])
            for j in range(size):
                self.tallies[size].add(position + j, rows[j], reference[i + j])
            i += size
            if self.budget_s is not None and self.tallies[size].is_inexact:
                self.sizes.remove(size)
                return

    def _go_back(self, n: int) -> None:
        """To the end of the prefix; a recurrent target by its state there."""
        if self.target.is_recurrent and n > 0:
            self.target.load_recurrent(0, self.state, n)
        else:
            self.target.truncate(0, n)

    def _decode(self, tokens: list[int], n_outputs: int | None = None) -> Rows:
        """Row of the last rows, all by default, float32 [n_outputs, n_vocab]."""
        if self.budget_s is not None and time.monotonic() - self.start > self.budget_s:
            raise _OutOfTimeError
        logits = self.target.decode(0, tokens, n_outputs=len(tokens) if n_outputs is None else n_outputs)
        if np.isnan(logits).any():
            raise BackendError(f"the target's logits at position {self.target.length(0) - 1} are not numbers")
        self.n_decodes += 1 if n_outputs is None else 0
        self.tick(self.n_decodes)
        return logits
