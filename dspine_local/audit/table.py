"""An audit as a table for people."""

from __future__ import annotations

from rich.table import Table

from dspine_local.audit.result import AuditResult, BatchResult
from dspine_local.audit.words import positions_in_words

_TITLES = ("batch", "draft", "rows", "same", "largest", "median", "flips", "margin")


def audit_table(result: AuditResult, n_ctx: int) -> Table:
    """One line per batch size."""
    table = Table(
        title=f"Batches against one by one, {result.n_tokens:,} tokens, temperature 0",
        caption="same: rows of logits with the same bits; largest, median: differences of logits; flips: changed most "
        "likely tokens per 1,000, margin: the largest by which one was preferred; exact: at which positions",
    )
    for title in _TITLES:
        table.add_column(title, justify="right", no_wrap=True)
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
        _where(batch, n_ctx),
    ]


def _where(batch: BatchResult, n_ctx: int) -> str:
    words = positions_in_words(batch.exact_ranges, n_ctx)
    return {"everywhere": "all", "nowhere": "none"}.get(words, words.removeprefix("at positions "))


def _size(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"
