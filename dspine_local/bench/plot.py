"""The run as pictures: speed-ups, acceptance along the draft, and what decodes and drafts cost by their length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dspine_local.bench.report import ALL, BenchReport
from dspine_local.evaluation.plot import check_plot, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_paths(prefix: Path) -> dict[str, Path]:
    """The pictures' files by name: in a folder that exists, else beside the prefix.

    Raises:
        FileNotFoundError: No such folder.
        ValueError: matplotlib is not installed, or a path is something else than a regular file.
    """
    names = ("speedup", "acceptance", "costs")
    stem = f"{prefix}/" if prefix.is_dir() else f"{prefix}-"
    return {name: check_plot(Path(f"{stem}{name}.png")) for name in names}


def plot_report(report: BenchReport, prefix: Path) -> list[Path]:
    """Write each picture that there are figures for, whole or not at all; older ones are replaced.

    Returns:
        The files that were written. Raises as ``plot_paths``.
    """
    from matplotlib.figure import Figure

    drawings: dict[str, Callable[[BenchReport, Figure], bool]] = {
        "speedup": draw_speedup,
        "acceptance": draw_acceptance,
        "costs": draw_costs,
    }
    written = []
    for name, path in plot_paths(prefix).items():
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        if not drawings[name](report, figure):
            continue
        if report.profile is not None:
            figure.suptitle(f"acceptance simulated: {report.profile.name}", color="firebrick")
        save_figure(figure, path)
        written.append(path)
    return written


def draw_speedup(report: BenchReport, figure: Figure) -> bool:
    """Bars of the median speed-up by category and system, with quartiles; False without plain decoding."""
    bars = [(r.system, r.category, r.speedup) for r in report.results if r.speedup is not None]
    systems = list(dict.fromkeys(system for system, _, _ in bars))
    categories = list(dict.fromkeys(category for _, category, _ in bars))
    if not bars:
        return False
    axes = figure.subplots()
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
        own = [(categories.index(category), s) for name, category, s in bars if name == system]
        heights = [s.median for _, s in own]
        errors = [[s.median - s.q1 for _, s in own], [s.q3 - s.median for _, s in own]]
        places = [place + (i - (len(systems) - 1) / 2) * width for place, _ in own]
        drawn = axes.bar(places, heights, width, yerr=errors, capsize=2, label=system)
        axes.bar_label(drawn, fmt="%.2f", fontsize=7, padding=2)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(categories)), categories)
    axes.set_ylabel("speed-up against plain decoding")
    axes.legend(fontsize=8)
    return True


def draw_acceptance(report: BenchReport, figure: Figure) -> bool:
    """How far drafts were accepted, by mode, over all prompts; False where nothing was drafted."""
    drafted = [r for r in report.results if r.category == ALL and r.accepted_per_position]
    if not drafted:
        return False
    axes = figure.subplots()
    for result in drafted:
        shares = result.accepted_per_position
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=result.system)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share accepted of the drafts verified there")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)
    return True


def draw_costs(report: BenchReport, figure: Figure) -> bool:
    """Milliseconds of a decode by its tokens and of a draft by its length, as steps; False without a drafter."""
    if report.costs is None:
        return False
    axes = figure.subplots()
    for label, points in (("verify", report.costs.verify), ("draft", report.costs.draft)):
        axes.step([n for n, _ in points], [us / 1e3 for _, us in points], where="mid", marker="o", label=label)
    axes.set_xlabel("tokens of the decode, or of the draft")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return True
