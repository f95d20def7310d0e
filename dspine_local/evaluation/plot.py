"""The evaluation as a picture: acceptance lengths, and how acceptance falls along the draft."""

from __future__ import annotations

from pathlib import Path

from dspine_local.evaluation.measure import EvaluationReport


def plot_report(report: EvaluationReport, path: Path) -> None:
    """Write a PNG.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'dspine-local[train]'") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    lengths, positions = figure.subplots(1, 2)
    names = [c.category for c in report.categories]
    bars = lengths.bar(names, [c.acceptance_length or 0.0 for c in report.categories], color="#4878a8")
    lengths.bar_label(bars, fmt="%.2f")
    lengths.set_ylabel("acceptance length (tokens per round)")
    lengths.set_ylim(bottom=1.0)
    if report.mean is not None:
        lengths.set_title(f"mean {report.mean:.2f}, {report.n_draft} drafted")
    for category in report.categories:
        shares = category.accepted_by_position
        positions.plot(range(1, len(shares) + 1), shares, marker="o", label=category.category)
    positions.set_xlabel("position in the draft")
    positions.set_ylabel("share accepted")
    positions.set_ylim(0, 1)
    positions.legend()
    figure.savefig(path, dpi=120, format="png")
