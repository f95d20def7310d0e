"""The look at memory before models are loaded: the context that fits, or a refusal with the plan."""

from __future__ import annotations

from dataclasses import replace

from dspine_local.errors import BackendError
from dspine_local.options import EngineOptions
from dspine_local.planning.devices import Budgets, memory_budgets
from dspine_local.planning.fit import Planner
from dspine_local.planning.measure import CPU, PlannedFiles
from dspine_local.planning.plan import MemoryPlan
from dspine_local.planning.table import advice_table, as_text, heading, plan_table


def fitting_context(files: PlannedFiles, options: EngineOptions, n_draft: int, budgets: Budgets | None = None) -> int:
    """Positions of all slots together to load with: as the options say, or the most that fit.

    A target that is mapped into host memory may be larger than what is free there: it is then read again and again,
    slowly, but nothing fails.

    Args:
        n_draft: Longest draft; 0 without a drafter.
        budgets: What the devices have; None asks them.
    Raises:
        BackendError: It does not fit. The message has the plan and what to change.
    """
    planner = Planner(files, memory_budgets() if budgets is None else budgets, n_draft)
    if options.n_ctx is None:
        largest = planner.largest(options)
        if largest is not None:
            return largest.n_ctx
        plan = planner.smallest(options)
    else:
        plan = planner.plan(options, options.n_ctx)
    if _loads(plan, options):
        return plan.n_ctx if options.n_ctx is None else options.n_ctx
    short = ", ".join(f"{n_bytes / (1 << 20):,.0f} MiB on {device}" for device, n_bytes in plan.missing.items())
    advice = planner.advice(options, plan.n_ctx)
    tables = [plan_table(plan), advice_table(advice)] if advice else [plan_table(plan)]
    raise BackendError(f"'{files.target}' does not fit: {short} are missing. {heading(plan)}\n{as_text(*tables)}")


def _loads(plan: MemoryPlan, options: EngineOptions) -> bool:
    """Whether loading should be tried: what is left free by choice, or read from a map, does not count."""
    mapped = ("target weights", CPU) if options.use_mmap else None
    needed = [line for line in plan.lines if line.part != "reserve" and (line.part, line.device) != mapped]
    return replace(plan, lines=tuple(needed)).fits
