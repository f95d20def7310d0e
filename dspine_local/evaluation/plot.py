"""The evaluation as a picture: acceptance lengths, and how acceptance falls along the draft."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dspine_local.evaluation.measure import EvaluationReport
from dspine_local.files import output_path, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot(path: Path) -> Path:
    """Where the picture will be written: to be asked before the hours of work that it shows.

    Raises:
        FileNotFoundError: No such folder.
        ValueError: matplotlib is not installed, or the path is something else than a regular file.
    """
    out = output_path(path, overwrite=True)
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    return out


def plot_report(report: EvaluationReport, path: Path) -> None:
    """Write a PNG, whole or not at all; an older one is replaced. Raises as ``check_plot``."""
    out = check_plot(path)
    from matplotlib.figure import Figure

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
    save_figure(figure, out)


def save_figure(figure: Figure, out: Path) -> None:
    """Write a PNG, whole or not at all."""
    write_whole(out, lambda partial: figure.savefig(partial, dpi=120, format="png"))
