"""A memory plan: lines of bytes, what each device has, and whether that is enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# In the order of the table.
PARTS = (
    "target weights",
    "target KV cache",
    "recurrent state",
    "recurrent snapshots",
    "target compute",
    "logits and taps",
    "vocabulary, graphs",
    "drafter weights",
    "drafter codes",
    "drafter output matrix",
    "drafter cache",
    "drafter compute",
    "reserve",
)
HOST_PARTS = ("logits and taps", "vocabulary, graphs")  # in host memory wherever the layers are


@dataclass(frozen=True)
class MemoryLine:
    """Bytes of one part (one of ``PARTS``) on one device."""

    part: str
    device: str
    n_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """What would be allocated where.

    Args:
        lines: In the order of ``PARTS``.
        budgets: Bytes that each device has for it.
        n_ctx: Positions of all slots together.
        n_parallel: Slots.
        n_draft: Tokens drafted per round at most; snapshots of recurrent states are kept for as many.
    """

    lines: tuple[MemoryLine, ...]
    budgets: Mapping[str, int]
    n_ctx: int
    n_parallel: int
    n_draft: int

    def needed(self, device: str) -> int:
        """Bytes that the device must have."""
        return sum(line.n_bytes for line in self.lines if line.device == device)

    def part(self, part: str) -> int:
        """Bytes of one part on all devices."""
        return sum(line.n_bytes for line in self.lines if line.part == part)

    @property
    def total(self) -> int:
        """Bytes on all devices."""
        return sum(line.n_bytes for line in self.lines)

    @property
    def missing(self) -> dict[str, int]:
        """Bytes that each device has too few; empty when everything fits."""
        short = {device: self.needed(device) - size for device, size in self.budgets.items()}
        return {device: n_bytes for device, n_bytes in short.items() if n_bytes > 0}

    @property
    def fits(self) -> bool:
        """Whether every device has enough."""
        return not self.missing

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values, sizes in bytes."""
        devices = {
            device: {"needed": self.needed(device), "available": size, "missing": self.missing.get(device, 0)}
            for device, size in self.budgets.items()
        }
        return {
            "fits": self.fits,
            "n_ctx": self.n_ctx,
            "n_parallel": self.n_parallel,
            "n_draft": self.n_draft,
            "lines": [{"part": line.part, "device": line.device, "bytes": line.n_bytes} for line in self.lines],
            "devices": devices,
        }
