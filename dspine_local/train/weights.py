"""The target's weights from its GGUF, dequantized: what training starts from and is frozen to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from dspine_local._native import GgufFile
from dspine_local.checks import shown
from dspine_local.convert.schema import ARCHITECTURE
from dspine_local.errors import ModelFormatError
from dspine_local.files import checked_path

Array = npt.NDArray[np.float32]


class TargetWeights:
    """A dense target's metadata and matrices.

    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: No whole GGUF of a target, or a key or tensor that training needs is missing.
    """

    def __init__(self, path: Path) -> None:
        GgufFile(str(checked_path(path)))  # checks the file, which gguf's reader does not
        self.path = path
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.arch = str(self.key("general.architecture", prefixed=False))
        if self.arch == ARCHITECTURE:
            raise ModelFormatError(f"'{path}' is a drafter, expected the target to train one for")

    def key(self, name: str, default: Any = None, *, prefixed: bool = True) -> Any:
        """A metadata value; names are the architecture's own unless not ``prefixed``."""
        field = self._reader.get_field(f"{self.arch}.{name}" if prefixed else name)
        if field is None:
            if default is None:
                raise ModelFormatError(f"'{self.path}' has no key '{name}', expected the GGUF of a language model")
            return default
        return field.contents()

    def integer(self, name: str, default: int | None = None) -> int:
        """A metadata value that training needs as one number.

        Raises:
            ModelFormatError: It is missing, or differs between layers.
        """
        value = self.key(name, default)
        if not isinstance(value, int):
            raise ModelFormatError(
                f"'{self.path}' (architecture '{self.arch}') has {name} = {shown(value)}, expected one number for all "
                "layers: such targets cannot be trained for"
            )
        return value

    @property
    def n_layers(self) -> int:
        """Layers that can be tapped: those for multi-token prediction are counted in the file, but are none."""
        return self.integer("block_count") - self.integer("nextn_predict_layers", 0)

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's [rows, columns] or [columns]."""
        return tuple(int(n) for n in reversed(self._need(name).shape))

    def tensor(self, name: str) -> Array:
        """A tensor as float32 [rows, columns] or [columns]."""
        tensor = self._need(name)
        values: Array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        return values

    def _need(self, name: str) -> gguf.ReaderTensor:
        if name not in self._tensors:
            raise ModelFormatError(f"'{self.path}' has no tensor '{name}'")
        return self._tensors[name]

    @property
    def embedding(self) -> Array:
        """Token embedding [V, D]."""
        return self.tensor("token_embd.weight")

    @property
    def head(self) -> Array:
        """Output matrix [V, D]."""
        return self.tensor("output.weight" if self.has("output.weight") else "token_embd.weight")

    @property
    def output_norm(self) -> Array:
        """Weight of the norm before the output matrix [D]."""
        return self.tensor("output_norm.weight")
