"""Which type to keep a drafter in: every one tried on the same prompts (docs/quantizing.md)."""

from __future__ import annotations

from dspine_local.sweep.choice import Comparison, compare, recommend
from dspine_local.sweep.result import PromptResult, Sweep, TypeResult
from dspine_local.sweep.run import sweep_types

__all__ = ["Comparison", "PromptResult", "Sweep", "TypeResult", "compare", "recommend", "sweep_types"]
