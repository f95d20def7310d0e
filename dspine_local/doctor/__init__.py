"""What this installation can do on this machine, and what stands in the way (docs/troubleshooting.md)."""

from __future__ import annotations

from dspine_local.doctor.examine import Device, Diagnosis, ModelGraphs, Operation, examine
from dspine_local.doctor.problems import Problem, problems

__all__ = ["Device", "Diagnosis", "ModelGraphs", "Operation", "Problem", "examine", "problems"]
