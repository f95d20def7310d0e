"""Draft lengths and positions in words."""

from __future__ import annotations

from collections.abc import Sequence

from dspine_local.audit.result import Range


def lengths_in_words(lengths: Sequence[int]) -> str:
    """``[1, 2, 3, 7]`` as "1-3, 7"; "none" for none."""
    runs: list[list[int]] = []
    for length in lengths:
        if runs and length == runs[-1][-1] + 1:
            runs[-1].append(length)
        else:
            runs.append([length])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def positions_in_words(ranges: Sequence[Range], n_ctx: int) -> str:
    """Rising ranges as "everywhere", "nowhere" or "at positions 0-255, 1024-2047"."""
    merged: list[list[int]] = []
    for first, last in ranges:
        if first >= n_ctx:
            break
        if merged and first == merged[-1][1]:
            merged[-1][1] = min(last, n_ctx)
        else:
            merged.append([first, min(last, n_ctx)])
    if merged == [[0, n_ctx]]:
        return "everywhere"
    return "at positions " + ", ".join(f"{first}-{last - 1}" for first, last in merged) if merged else "nowhere"


def exactness_in_words(ranges: Sequence[Sequence[Range]], n_ctx: int) -> str:
    """Of the draft lengths from 1 on, those that are exact, and where: "1-2 everywhere; 3-15 at positions 0-255"."""
    by_place: dict[str, list[int]] = {}
    for length, where in enumerate(ranges, start=1):
        by_place.setdefault(positions_in_words(where, n_ctx), []).append(length)
    parts = [f"{lengths_in_words(some)} {place}" for place, some in by_place.items() if place != "nowhere"]
    return "; ".join(parts) or "none"
