"""The compiled extension's interface (native/bindings.cpp). A test holds it against the built module."""

from typing import Any

import numpy as np
import numpy.typing as npt

class DSpineError(Exception): ...
class ModelFormatError(DSpineError): ...
class PairingError(DSpineError): ...
class ContextLengthError(DSpineError): ...
class BackendError(DSpineError): ...

class TensorInfo:
    """One tensor of a GGUF file: ``shape`` is in ggml's order (ne0, the row length, first), sizes in bytes."""

    name: str
    type: str
    shape: list[int]
    n_bytes: int

class GgufFile:
    """A GGUF file's header: metadata and tensor list, read and checked without the tensor data.

    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: Not a GGUF file, damaged, or shorter than its tensors need.
    """

    def __init__(self, path: str) -> None: ...
    def keys(self) -> list[str]: ...
    def get(self, key: str) -> Any:
        """The value as int, float, bool, str or a list of these. Raises KeyError."""
    def tensors(self) -> list[TensorInfo]: ...

def vocab_sha256(path: str) -> str:
    """SHA-256 (hex) of a target's vocabulary: every ``tokenizer.ggml.tokens`` string as u32 length + bytes."""

def type_layout(type_name: str) -> tuple[int, int]:
    """Elements and bytes of one block of a ggml type, e.g. ``("q8_0") -> (32, 34)``. Raises ValueError."""

def quantize(rows: npt.NDArray[np.float32], type_name: str, n_threads: int = 0) -> npt.NDArray[np.uint8]:
    """Encode float32 rows [n_rows, n_per_row] in a ggml type with ggml's own quantizer; uint8 [n_rows, row_bytes].

    ``type_name`` is ggml's: f32, f16, bf16, q8_0, q6_K, q5_K, q4_K, q4_0 (case-insensitive). GIL released.
    Raises ValueError for a row length that the block size does not divide.
    """
