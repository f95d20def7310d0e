"""llama.cpp's importance matrices: for each tensor, how large each of its inputs was on average.

Two formats, told apart by their first bytes: GGUF (tensors ``NAME.in_sum2`` and ``NAME.counts``, as tools/imatrix of
the pinned llama.cpp writes it) and the older one without a name (entries of name, calls and values).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
import numpy.typing as npt

from dspine_local.errors import ModelFormatError
from dspine_local.files import need_regular

ImportanceMatrix = dict[str, npt.NDArray[np.float32]]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_NAME, _MAX_VALUES = 256, 1 << 28


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Mean squared inputs by tensor name, float32 [columns] (times experts).

    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: Neither format, damaged, or a value that is negative or not finite.
    """
    need_regular(path, "the importance matrix")
    with path.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        matrix = _read_gguf(path) if magic == b"GGUF" else _read_entries(path, file)
    if not matrix:
        raise ModelFormatError(f"'{path}' has no entries, expected an importance matrix of llama.cpp")
    for name, values in matrix.items():
        if not np.isfinite(values).all() or (values < 0).any():
            raise ModelFormatError(f"'{path}' has values for '{name}' that are negative or not finite")
    return matrix


def _read_gguf(path: Path) -> ImportanceMatrix:
    from dspine_local import _native

    header = _native.GgufFile(str(path))  # checks what gguf-py takes on trust
    names = {tensor.name for tensor in header.tensors() if tensor.type == "f32"}
    reader = gguf.GGUFReader(path)
    arrays = {t.name: np.array(t.data, dtype=np.float32).reshape(-1) for t in reader.tensors if t.name in names}
    matrix = {}
    for name, sums in arrays.items():
        if not name.endswith(_SUMS):
            continue
        counts = arrays.get(name.removesuffix(_SUMS) + _COUNTS)
        if counts is None or counts.size == 0 or sums.size % counts.size:
            raise ModelFormatError(f"'{path}' has '{name}' without counts that fit")
        per_expert = sums.reshape(counts.size, -1)
        seen = counts > 0
        mean = np.ones_like(per_expert)  # of an expert that was never used nothing is known
        mean[seen] = per_expert[seen] / counts[seen, None]
        matrix[name.removesuffix(_SUMS)] = mean.reshape(-1)
    return matrix


def _read_entries(path: Path, file: BinaryIO) -> ImportanceMatrix:
    def number(what: str, low: int, high: int) -> int:
        raw = file.read(4)
        value = struct.unpack("<i", raw)[0] if len(raw) == 4 else None
        if value is None or not low <= value <= high:
            raise ModelFormatError(f"'{path}' is no importance matrix: {what} is {value}, expected {low} to {high}")
        return int(value)

    matrix: ImportanceMatrix = {}
    for _ in range(number("the number of entries", 1, 1 << 20)):
        name = file.read(number("a name's length", 1, _MAX_NAME)).decode("utf-8", "replace")
        n_calls = number(f"the calls of '{name}'", 0, (1 << 31) - 1)
        n_values = number(f"the values of '{name}'", 1, _MAX_VALUES)
        raw = file.read(4 * n_values)
        if len(raw) != 4 * n_values:
            raise ModelFormatError(f"'{path}' ends inside the values of '{name}'")
        matrix[name] = np.frombuffer(raw, "<f4").astype(np.float32) / np.float32(max(1, n_calls))
    return matrix
