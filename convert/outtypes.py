"""The tensor types a drafter can be stored in, and what to use when rows do not divide into a type's blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gguf import GGMLQuantizationType, LlamaFileType

from dspine_local._native import type_layout


@dataclass(frozen=True)
class OutType:
    """A ggml type: its numbers in GGUF and the largest magnitude that it keeps finite."""

    name: str
    ggml: GGMLQuantizationType
    file_type: LlamaFileType
    max_abs: float

    @property
    def block_size(self) -> int:
        """Values per block."""
        return type_layout(self.name)[0]

    def row_bytes(self, n_cols: int) -> int:
        """Bytes of one row of ``n_cols`` values, which the block size must divide."""
        n_values, n_bytes = type_layout(self.name)
        return n_cols // n_values * n_bytes


# float16 and the float16 scales of blocks overflow above this.
_MAX_F16 = 65504.0
_MAX_BF16 = float.fromhex("0x1.fep127")

OUTTYPES: dict[str, OutType] = {
    t.name: t
    for t in (
        OutType("f32", GGMLQuantizationType.F32, LlamaFileType.ALL_F32, math.inf),
        OutType("f16", GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16, _MAX_F16),
        OutType("bf16", GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16, _MAX_BF16),
        OutType("q8_0", GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0, _MAX_F16),
        OutType("q6_k", GGMLQuantizationType.Q6_K, LlamaFileType.MOSTLY_Q6_K, _MAX_F16),
        OutType("q5_k", GGMLQuantizationType.Q5_K, LlamaFileType.MOSTLY_Q5_K_M, _MAX_F16),
        OutType("q4_k", GGMLQuantizationType.Q4_K, LlamaFileType.MOSTLY_Q4_K_M, _MAX_F16),
        OutType("q5_0", GGMLQuantizationType.Q5_0, LlamaFileType.MOSTLY_Q5_0, _MAX_F16),
        OutType("q5_1", GGMLQuantizationType.Q5_1, LlamaFileType.MOSTLY_Q5_1, _MAX_F16),
        OutType("q4_0", GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0, _MAX_F16),
        OutType("q4_1", GGMLQuantizationType.Q4_1, LlamaFileType.MOSTLY_Q4_1, _MAX_F16),
        OutType("q3_k", GGMLQuantizationType.Q3_K, LlamaFileType.MOSTLY_Q3_K_M, _MAX_F16),
        OutType("q2_k", GGMLQuantizationType.Q2_K, LlamaFileType.MOSTLY_Q2_K, _MAX_F16),
    )
}


@dataclass(frozen=True)
class Fallback:
    """A tensor that is stored in another type than asked for."""

    tensor: str
    wanted: str
    got: str
    reason: str

    @classmethod
    def for_rows(cls, tensor: str, n_cols: int, wanted: OutType, got: OutType) -> Fallback:
        """For rows that are not whole blocks of the type that was asked for."""
        reason = f"rows of {n_cols} values do not divide into blocks of {wanted.block_size}"
        return cls(tensor, wanted.name, got.name, reason)


def parse_outtype(name: str) -> OutType:
    """The type of that name, in any case.

    Raises:
        ValueError: Unknown name.
    """
    outtype = OUTTYPES.get(name.lower())
    if outtype is None:
        raise ValueError(f"unknown output type '{name}', expected one of {', '.join(OUTTYPES)}")
    return outtype


# What llama.cpp's quantizer falls back to as well where a row is not whole blocks of 256 (tensor_type_fallback in its
# src/llama-quant.cpp), with q4_0 in place of iq4_nl.
_FALLBACKS = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def type_for(n_cols: int, wanted: OutType) -> OutType:
    """``wanted`` if rows of ``n_cols`` values are whole blocks of it, else the next larger one that fits, else f16."""
    simple = OUTTYPES[_FALLBACKS.get(wanted.name, "f16")]
    return next(t for t in (wanted, simple, OUTTYPES["f16"]) if n_cols % t.block_size == 0)
