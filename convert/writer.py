"""Writes a drafter's GGUF: metadata first, then tensors streamed through ggml's quantizers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Protocol

import gguf
import numpy as np
import numpy.typing as npt

from dspine_local._native import quantize
from dspine_local.convert.outtypes import OUTTYPES, Fallback, OutType, type_for
from dspine_local.convert.tensors import PlannedTensor
from dspine_local.errors import ModelFormatError

# GGUF value types by Python type; a number that is not text or a flag needs its width said.
Value = str | bool | np.uint32 | np.float32 | Sequence[int] | Sequence[bool]

# Bytes done, bytes in all, tensor at work.
Progress = Callable[[int, int, str], None]


class TensorSource(Protocol):
    """A tensor of some file: ``shape`` is [rows, columns] or [columns]."""

    @property
    def name(self) -> str:
        """In its file."""

    @property
    def file(self) -> Path:
        """Where it lies."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns, or columns."""

    def rows(self) -> Iterator[npt.NDArray[np.float32]]:
        """Its rows in order, float32 [1 or more, columns] at a time."""

    def stored_as(self, type_name: str) -> Iterator[npt.NDArray[np.uint8]] | None:
        """Its bytes in order, where the file has it in this type and they can be taken as they are."""


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the GGUF: where its values come from, its type, and how much each column matters when rounding.

    ``importance`` is float32 [columns], as in llama.cpp's importance matrices.
    """

    name: str
    source: TensorSource
    type: OutType
    importance: npt.NDArray[np.float32] | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes in the GGUF, without padding."""
        return prod(self.source.shape[:-1]) * self.type.row_bytes(self.source.shape[-1])


def choose_types(planned: Sequence[PlannedTensor], wanted: OutType) -> tuple[list[OutputTensor], list[Fallback]]:
    """Each tensor's type: float32 for vectors, ``wanted`` for matrices where their rows allow it."""
    outputs, fallbacks = [], []
    for tensor in planned:
        if tensor.is_vector:
            outputs.append(OutputTensor(tensor.name, tensor.stored, OUTTYPES["f32"]))
            continue
        n_cols = tensor.stored.shape[-1]
        got = type_for(n_cols, wanted)
        outputs.append(OutputTensor(tensor.name, tensor.stored, got))
        if got is not wanted:
            fallbacks.append(Fallback.for_rows(tensor.name, n_cols, wanted, got))
    return outputs, fallbacks


def write_gguf(
    path: Path,
    architecture: str,
    add_metadata: Callable[[gguf.GGUFWriter], None],
    tensors: Sequence[OutputTensor],
    progress: Progress | None = None,
) -> int:
    """Write a GGUF file, one chunk of rows in memory at a time. Nothing is left at ``path`` on failure.

    The file is written under a temporary name of the same folder and renamed when whole.

    Returns:
        The file's size in bytes.
    Raises:
        ModelFormatError: A weight that is not finite, or too large for its type.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        writer = gguf.GGUFWriter(partial, architecture)
        add_metadata(writer)
        for tensor in tensors:
            shape = tensor.source.shape
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=tensor.type.ggml)
        with contextlib.closing(writer):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            assert writer.fout is not None
            _stream(writer, writer.fout[0], tensors, progress)
            writer.fout[0].flush()
            os.fsync(writer.fout[0].fileno())
        n_bytes = partial.stat().st_size
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return n_bytes


def _stream(writer: gguf.GGUFWriter, out: BinaryIO, tensors: Sequence[OutputTensor], progress: Progress | None) -> None:
    total = sum(tensor.n_bytes for tensor in tensors)
    done = 0
    writer.write_padding(out, out.tell())
    for tensor in tensors:
        for rows in _encoded(tensor):
            if progress is not None:
                progress(done, total, tensor.name)
            out.write(rows.data)
            done += rows.nbytes
        writer.write_padding(out, tensor.n_bytes)
    if progress is not None:
        progress(total, total, "")


def _encoded(tensor: OutputTensor) -> Iterator[npt.NDArray[np.uint8]]:
    as_it_is = tensor.source.stored_as(tensor.type.name)
    if as_it_is is not None:
        yield from as_it_is
        return
    first = 0
    for rows in tensor.source.rows():
        _check_values(rows, first, tensor.source, tensor.type)
        yield quantize(rows, tensor.type.name, tensor.importance)
        first += len(rows)


def _check_values(rows: npt.NDArray[np.float32], first: int, source: TensorSource, out: OutType) -> None:
    low, high = rows.min(), rows.max()
    # A NaN anywhere makes both NaN, and no comparison with NaN is true.
    if -out.max_abs <= low and high <= out.max_abs and np.isfinite(low) and np.isfinite(high):
        return
    finite = np.isfinite(rows)
    bad = ~finite if not finite.all() else np.abs(rows) > out.max_abs
    row, col = (int(i) for i in np.argwhere(bad)[0])
    expected = "a finite number" if not finite.all() else f"at most {out.max_abs:g} for {out.name} (use f32 or bf16)"
    where = f"row {first + row}, column {col}" if len(source.shape) > 1 else f"position {col}"
    raise ModelFormatError(
        f"'{source.file}' has tensor '{source.name}' with {rows[row, col]} at {where}, expected {expected}"
    )


def add_key(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    """Add one entry of the metadata, in the GGUF type of the value's Python type."""
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, np.uint32):
        writer.add_uint32(key, int(value))
    elif isinstance(value, np.float32):
        writer.add_float32(key, float(value))
    else:
        writer.add_array(key, value)
