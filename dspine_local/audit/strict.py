"""The draft lengths that ``strict`` allows: what an audit on record found exact, or a short one that is made now."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from dspine_local import _native
from dspine_local.audit.cases import short_cases
from dspine_local.audit.measure import measure
from dspine_local.audit.record import read_audit, write_audit
from dspine_local.audit.result import AuditResult, Range
from dspine_local.audit.words import exactness_in_words, positions_in_words
from dspine_local.options import EngineOptions
from dspine_local.progress import progress_bar
from dspine_local.tokenizer import Tokenizer

SHORT_AUDIT_S = 15.0

_log = logging.getLogger(__name__)


def exact_ranges(target: _native.Target, options: EngineOptions, n_draft: int) -> list[list[Range]]:
    """For each draft length from 1 to ``n_draft``, the positions where it is exact; and says so. Empties a sequence.

    Raises:
        BackendError: A decode failed, or gave logits that are not numbers.
    """
    result = read_audit(target, options)
    if result is None:
        result = short_audit(target, n_draft)
        write_audit(target, options, result)
    ranges = result.ranges(n_draft)
    say_exact(Path(target.path).name, ranges, target.n_ctx_seq, complete=result.complete)
    return ranges


def short_audit(target: _native.Target, n_draft: int) -> AuditResult:
    """An audit of a few seconds, of batches for drafts of up to ``n_draft`` tokens."""
    tokenizer = Tokenizer(target)
    cases = short_cases(tokenizer, target.n_ctx_seq)
    with progress_bar("Auditing", unit="steps") as report:
        return measure(target, cases, range(2, n_draft + 2), budget_s=SHORT_AUDIT_S, report=report)


def say_exact(model: str, ranges: Sequence[Sequence[Range]], n_ctx: int, *, complete: bool = True) -> None:
    """One line: a warning where drafting is restricted."""
    words = exactness_in_words(ranges, n_ctx)
    more = "" if complete else ", a short audit: `dspine-local audit` measures more"
    if words == "none":
        _log.warning(
            "strict: no draft length is exact for '%s' loaded like this: nothing is drafted (docs/lossless.md%s)",
            model,
            more,
        )
    elif all(positions_in_words(where, n_ctx) == "everywhere" for where in ranges):
        _log.info("strict: all draft lengths are exact for '%s'", model)
    else:
        _log.warning(
            "strict: exact draft lengths for '%s': %s; nothing else is drafted (docs/lossless.md%s)",
            model,
            words,
            more,
        )
