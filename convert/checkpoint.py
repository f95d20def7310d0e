"""A checkpoint folder as a user downloads it: config and tensors, read in chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.utility import SafetensorsLocal
from safetensors import SafetensorError, safe_open

from dspine_local.convert.fields import load_json
from dspine_local.errors import ModelFormatError
from dspine_local.files import need_regular

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
# Some DFlash drafters replace the target's embedding of the mask token; drafting without it would fail silently.
MASK_EMBEDDING_FILE = "mask_embedding.pt"

# One chunk of rows as float32. Large enough to quantize on all cores, small beside the interpreter itself.
CHUNK_BYTES = 8 << 20

# bfloat16 is the upper half of a float32, which numpy can widen by a shift.
FLOAT_DTYPES: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies. ``shape`` is [rows, columns] or [columns], ``offset`` in bytes from the file's start."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def rows(self) -> Iterator[npt.NDArray[np.float32]]:
        """See ``read_rows``."""
        return read_rows(self)

    def stored_as(self, type_name: str) -> None:
        """Never taken as it is: a checkpoint's numbers are checked on the way."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder's config, not nested, and all tensors of all its files."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def config_file(self) -> Path:
        """Where the config was read."""
        return self.folder / CONFIG_FILE

    @property
    def files(self) -> set[Path]:
        """The files that hold tensors."""
        return {tensor.file for tensor in self.tensors.values()}


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's config and headers, without its weights.

    Every ``*.safetensors`` file of the folder belongs to it: one file, shards, or codes beside the weights.

    Raises:
        FileNotFoundError: No folder, no config, no safetensors file, or a shard of the index is missing.
        ModelFormatError: A damaged file, a tensor held twice, or an index that its shards contradict.
    """
    if not folder.exists():
        raise FileNotFoundError(f"no such checkpoint folder: '{folder}'")
    if not folder.is_dir():
        raise ModelFormatError(f"'{folder}' is a file, expected the checkpoint's folder (config.json, *.safetensors)")
    config = _unnested(folder / CONFIG_FILE)
    if (folder / MASK_EMBEDDING_FILE).exists():
        raise ModelFormatError(
            f"'{folder / MASK_EMBEDDING_FILE}' replaces the target's embedding of the mask token, "
            "which this version does not support"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for tensor in _read_header(file):
            if tensor.name in tensors:
                raise ModelFormatError(
                    f"tensor '{tensor.name}' is both in '{tensors[tensor.name].file}' and in '{file}', expected one"
                )
            tensors[tensor.name] = tensor
    if (folder / INDEX_FILE).exists():
        _check_index(folder, tensors)
    if not tensors:
        raise FileNotFoundError(f"no tensors in '{folder}': expected model.safetensors or its shards")
    return Checkpoint(folder, config, tensors)


def read_rows(tensor: StoredTensor, chunk_bytes: int = CHUNK_BYTES) -> Iterator[npt.NDArray[np.float32]]:
    """Yield a tensor's rows in order, as many at a time as fit in ``chunk_bytes`` of float32.

    The file is read, not mapped: mapped pages would count as this process's memory.

    Args:
        tensor: Of a dtype in ``FLOAT_DTYPES``, shape [rows, columns] or [columns].
    Returns:
        Chunks, float32 [1 or more rows, columns].
    Raises:
        ModelFormatError: The file has become shorter than its header says.
    """
    dtype = FLOAT_DTYPES[tensor.dtype]
    n_cols = tensor.shape[-1]
    n_rows = prod(tensor.shape[:-1])
    step = max(1, chunk_bytes // (4 * n_cols))
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        for first in range(0, n_rows, step):
            n_values = min(step, n_rows - first) * n_cols
            stored = np.fromfile(file, dtype, n_values)
            if stored.size != n_values:
                raise ModelFormatError(f"'{tensor.file}' ends inside tensor '{tensor.name}'")
            if tensor.dtype == "BF16":
                bits = stored.astype(np.uint32)
                bits <<= 16
                stored = bits.view(np.float32)
            yield stored.astype(np.float32, copy=False).reshape(-1, n_cols)


def read_flag(tensor: StoredTensor) -> bool:
    """A boolean scalar.

    Raises:
        ModelFormatError: Another dtype, or more than one value.
    """
    if tensor.dtype != "BOOL" or prod(tensor.shape) != 1:
        raise ModelFormatError(
            f"'{tensor.file}' has tensor '{tensor.name}' of type {tensor.dtype} and shape {list(tensor.shape)}, "
            "expected one BOOL"
        )
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        return file.read(1) != b"\0"


def _unnested(path: Path) -> dict[str, Any]:
    need_regular(path, "the checkpoint's config")
    config = load_json(path)
    inner = config.get("config")
    if inner is None:
        return config
    if not isinstance(inner, dict):
        raise ModelFormatError(f"'{path}' has config = {inner!r}, expected an object")
    if others := sorted(set(config) - {"config"}):
        raise ModelFormatError(f"'{path}' has '{others[0]}' beside its nested 'config', expected nothing else")
    return inner


def _read_header(file: Path) -> list[StoredTensor]:
    need_regular(file, "tensors of the checkpoint")
    try:
        # The official reader checks sizes, offsets and types; gguf's gives the places in the file.
        with safe_open(file, framework="numpy"):
            pass
        found = SafetensorsLocal(file).tensors
    except (SafetensorError, ValueError) as error:
        raise ModelFormatError(f"'{file}' is not a whole safetensors file: {error}") from error
    except OSError as error:
        raise OSError(error.errno, f"could not read: {error.strerror or error}", str(file)) from error
    return [StoredTensor(name, file, t.dtype, t.shape, t.data_range.offset) for name, t in found.items()]


def _check_index(folder: Path, tensors: dict[str, StoredTensor]) -> None:
    path = folder / INDEX_FILE
    need_regular(path, "the checkpoint's list of shards")
    weight_map = load_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelFormatError(f"'{path}' has no 'weight_map' from tensor names to file names")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or "\0" in shard:
            raise ModelFormatError(f"'{path}' names the shard {shard!r}, expected a file of the same folder")
        if not (folder / shard).exists():
            raise FileNotFoundError(f"no such file: '{folder / shard}' (a shard that '{path}' lists)")
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise ModelFormatError(f"'{path}' says that '{shard}' holds tensor '{name}', which is not there")
    shards = set(weight_map.values())
    for tensor in tensors.values():
        if tensor.file.name in shards and tensor.name not in weight_map:
            raise ModelFormatError(f"'{tensor.file}' holds tensor '{tensor.name}', which '{path}' does not list")
