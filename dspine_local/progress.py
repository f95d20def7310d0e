"""Progress bars of the commands: on stderr, and only when a person is watching it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

# Units done, units in all, what is at work.
Report = Callable[[int, int, str], None]


@contextmanager
def progress_bar(title: str, *, unit: str = "bytes") -> Iterator[Report]:
    """Show a bar while the block runs, and remove it afterwards.

    Args:
        title: What is done, e.g. ``"Converting"``.
        unit: ``"bytes"`` (shown as MiB), or ``"steps"``.
    Returns:
        A function to call with units done, units in all and a label. It does nothing when stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total, _label: None
        return
    counts: ProgressColumn = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        counts,
        TimeRemainingColumn(),
        TextColumn("{task.fields[label]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, label="")
        yield lambda done, total, label: bar.update(task, completed=done, total=total, label=label)
