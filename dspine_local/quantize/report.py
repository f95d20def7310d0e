"""What a quantization wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dspine_local.convert.outtypes import Fallback


@dataclass(frozen=True)
class QuantizationReport:
    """What was written, or would be.

    Args:
        kind: drafter or target.
        bytes_before: Of the tensors, without the header, as ``bytes_after``.
        bits_per_weight: Afterwards.
        types: Tensors by type.
        n_importance: Tensors that an importance matrix was used for; None without one.
        written: False for a dry run.
    """

    path: Path
    kind: str
    type: str
    n_tensors: int
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    types: Mapping[str, int]
    fallbacks: tuple[Fallback, ...]
    n_importance: int | None
    written: bool
