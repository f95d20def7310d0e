"""Drafter checkpoints (Hugging Face folders of safetensors) to GGUF.

``checkpoint`` opens a folder, ``config`` reads its hyperparameters, ``tensors`` maps names and shapes, ``pairing``
compares with a target, ``writer`` streams the file. ``schema`` has the names of the result.
"""

from __future__ import annotations

from dspine_local.convert.outtypes import OUTTYPES, Fallback
from dspine_local.convert.run import ConversionReport, convert_checkpoint

__all__ = ["OUTTYPES", "ConversionReport", "Fallback", "convert_checkpoint"]
