"""Tensors of a GGUF file as sources of rows: the file is read, not mapped, one chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dspine_local import _native
from dspine_local.convert.checkpoint import CHUNK_BYTES
from dspine_local.errors import ModelFormatError

_FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class GgufTensorSource:
    """One tensor of a GGUF file; ``shape`` is [rows, columns] or [columns], ``type_name`` in lower case."""

    name: str
    file: Path
    type_name: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int

    def rows(self) -> Iterator[npt.NDArray[np.float32]]:
        """Decoded rows in order, as many at a time as fit in ``CHUNK_BYTES`` of float32."""
        for encoded in self._encoded(max(1, CHUNK_BYTES // (4 * self.shape[-1]))):
            yield _native.dequantize(encoded, self.type_name)

    def stored_as(self, type_name: str) -> Iterator[npt.NDArray[np.uint8]] | None:
        """The bytes as they are, if the file has them in this type."""
        return self._encoded(max(1, CHUNK_BYTES // self._row_bytes)) if type_name == self.type_name else None

    @property
    def _row_bytes(self) -> int:
        return self.n_bytes // prod(self.shape[:-1])

    def _encoded(self, step: int) -> Iterator[npt.NDArray[np.uint8]]:
        n_rows = prod(self.shape[:-1])
        with self.file.open("rb") as file:
            file.seek(self.offset)
            for first in range(0, n_rows, step):
                n = min(step, n_rows - first)
                part = np.fromfile(file, np.uint8, n * self._row_bytes)
                if part.size != n * self._row_bytes:
                    raise ModelFormatError(f"'{self.file}' ends inside tensor '{self.name}'")
                yield part.reshape(n, self._row_bytes)


def tensor_sources(file: Path, header: _native.GgufFile) -> list[GgufTensorSource]:
    """All tensors of a file, in its order."""
    return [
        GgufTensorSource(t.name, file, t.type.lower(), tuple(reversed(t.shape)), t.offset, t.n_bytes)
        for t in header.tensors()
    ]


def check_first_time(file: Path, name: str, type_name: str) -> None:
    """Refuse to round a tensor that was rounded before.

    Raises:
        ValueError: Its type is a quantized one.
    """
    if type_name not in _FLOATS:
        raise ValueError(
            f"'{file}' has '{name}' as {type_name}, which is quantized already: take a file in f16, bf16 or f32, or "
            "allow it (--allow-requantize) at some loss"
        )
