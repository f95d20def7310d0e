"""Acceptance length of a drafter on sets of prompts (docs/training.md, evaluation)."""

from __future__ import annotations

from dspine_local.evaluation.measure import EvaluationReport, SetResult, evaluate
from dspine_local.evaluation.prompts import Prompt, load_prompts

__all__ = ["EvaluationReport", "Prompt", "SetResult", "evaluate", "load_prompts"]
