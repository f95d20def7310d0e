"""Other types for the weights of drafters and targets.

``drafter`` rewrites a drafter's file through our own streaming quantizer, ``target`` lets llama.cpp rewrite a target in
a process of its own, ``imatrix`` reads importance matrices.
"""

from __future__ import annotations

from dspine_local.quantize.report import QuantizationReport
from dspine_local.quantize.run import quantize_file

__all__ = ["QuantizationReport", "quantize_file"]
