"""An audit as a table for people."""

from __future__ import annotations

from rich.table import Table

from dspine_local.audit.result import AuditResult, BatchResult
from dspine_local.audit.words import positions_in_words

_TITLES = ("batch", "drafted", "rows", "same bits", "largest difference", "median", "flips per 1,000", "largest margin")


def audit_table(result: AuditResult, n_ctx: int) -> Table:
    """One line per batch size."""
    table = Table(title=f"Batches against one by one, {result.n_tokens:,} tokens, temperature 0")
    for title in _TITLES:
        table.add_column(title, justify="right")
    table.add_column("exact")
    for batch in result.batches:
        table.add_row(*_cells(batch, n_ctx))
    return table


def _cells(batch: BatchResult, n_ctx: int) -> list[str]:
    share = f"{100 * batch.identical / batch.rows:.1f} %" if batch.rows else "-"
    margin = f"{batch.flip_margins[-1]:.2g}" if batch.flip_margins else ""
    return [
        *(str(batch.batch_size), str(batch.n_draft), f"{batch.rows:,}", share),
        *(_size(batch.max_abs_diff), _size(batch.median_abs_diff), f"{batch.flips_per_1000:.1f}", margin),
        positions_in_words(batch.exact_ranges, n_ctx).removeprefix("at positions "),
    ]


def _size(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"
