"""A sweep for people: a table, a sentence, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from dspine_local.evaluation.plot import check_plot, save_figure
from dspine_local.sweep.choice import TOLERANCE, Comparison

MIB = 1 << 20


def sweep_table(compared: Sequence[Comparison]) -> Table:
    """A row per type, the largest file first."""
    table = Table(
        title="One drafter in several types",
        caption="draft ms: one draft; length: tokens per round; speed: expected tokens/s over the fastest type's; "
        "±: half of the middle 95 % over draws of prompts, of the length against the largest file's, of the speed "
        "against the fastest type's; *: no other type is as small and as fast",
    )
    table.add_column("type", no_wrap=True)
    for title in ("MiB", "draft ms", "length", "±", "speed", "±", "*"):
        table.add_column(title, justify="right", no_wrap=True)
    for c in sorted(compared, key=lambda c: -c.result.n_bytes):
        table.add_row(
            c.result.type + (f" ({c.result.fallbacks} others)" if c.result.fallbacks else ""),
            f"{c.result.n_bytes / MIB:,.1f}",
            f"{1e3 * c.result.draft_s:.2f}",
            f"{c.result.length:.3f}",
            f"{(c.length_high - c.length_low) / 2:.3f}",
            f"{c.speed:.3f}",
            f"{(c.high - c.low) / 2:.3f}",
            "*" if c.is_pareto else "",
        )
    return table


def advice(chosen: Comparison, compared: Sequence[Comparison]) -> str:
    """The recommendation in one sentence, with its reason."""
    smaller = [c for c in compared if c.result.n_bytes < chosen.result.n_bytes]
    fastest = max(compared, key=lambda c: c.speed)
    reason = (
        "the fastest, and no smaller one is as fast"
        if chosen is fastest
        else f"the smallest that is not measurably slower than {fastest.result.type}, the fastest "
        f"({100 * (chosen.speed - 1):+.1f} %; up to {100 * TOLERANCE:.0f} % is allowed)"
    )
    slower = f"; smaller ones are slower: {', '.join(c.result.type for c in smaller)}" if smaller else ""
    return f"Take {chosen.result.type}: {reason}{slower}."


def plot_sweep(compared: Sequence[Comparison], chosen: Comparison, path: Path) -> None:
    """Write a PNG: expected speed against size, whole or not at all. Raises as ``check_plot``."""
    out = check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    largest = max(c.result.n_bytes for c in compared)
    for c in compared:
        side, x = ("right", -6) if c.result.n_bytes > 0.6 * largest else ("left", 6)  # within the axes
        color = "#c05030" if c is chosen else "#4878a8"
        spread = [[max(0.0, c.speed - c.low)], [max(0.0, c.high - c.speed)]]
        axes.errorbar([c.result.n_bytes / MIB], [c.speed], spread, color=color, marker="o", capsize=3)
        label = f"{c.result.type}: length {c.result.length:.2f}, draft {1e3 * c.result.draft_s:.1f} ms"
        at = (c.result.n_bytes / MIB, c.speed)
        axes.annotate(label, at, xytext=(x, 5), textcoords="offset points", fontsize=8, ha=side)
    axes.set_xlabel("MiB")
    axes.set_ylabel("expected tokens/s, the fastest is 1")
    axes.margins(x=0.25, y=0.15)
    axes.set_title(f"recommended: {chosen.result.type}")
    save_figure(figure, out)
