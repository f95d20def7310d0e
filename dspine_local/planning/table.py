"""A memory plan for people: a table, and what to change when it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

from dspine_local.planning.devices import MIB
from dspine_local.planning.fit import Advice
from dspine_local.planning.plan import MemoryPlan


def heading(plan: MemoryPlan) -> str:
    """What the plan is for, in one line."""
    slots = "1 slot" if plan.n_parallel == 1 else f"{plan.n_parallel} slots"
    drafts = f", drafts of up to {plan.n_draft}" if plan.n_draft else ""
    return f"{plan.n_ctx:,} positions, {slots}{drafts}:"


def plan_table(plan: MemoryPlan) -> Table:
    """A row per part, a column per device, in MiB."""
    devices = [device for device in plan.budgets if plan.needed(device)]
    table = Table()
    table.add_column("MiB")
    for device in devices:
        table.add_column(device, justify="right")
    for part in dict.fromkeys(line.part for line in plan.lines):
        sizes = [sum(x.n_bytes for x in plan.lines if (x.part, x.device) == (part, device)) for device in devices]
        table.add_row(part, *(_mib(n_bytes) if n_bytes else "" for n_bytes in sizes))
    table.add_section()
    table.add_row("needed", *(_mib(plan.needed(device)) for device in devices))
    table.add_row("available", *(_mib(plan.budgets[device]) for device in devices))
    table.add_row("left", *(_mib(plan.budgets[device] - plan.needed(device)) for device in devices))
    return table


def advice_table(advice: Sequence[Advice]) -> Table:
    """Changes, the cheapest first; each alone."""
    table = Table()
    for name in ("what would help", "saves MiB", "fits then", "price"):
        table.add_column(name, justify="right" if name == "saves MiB" else "left")
    for entry in advice:
        table.add_row(entry.change, _mib(entry.saves), "yes" if entry.fits else "no", entry.price)
    return table


def as_text(*tables: Table) -> str:
    """Tables as plain lines, for a message."""
    console = Console(file=StringIO(), width=100, color_system=None)
    for table in tables:
        console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.0f}" if abs(n_bytes) >= 10 * MIB else f"{n_bytes / MIB:,.1f}"
