"""A slot in a file: its tokens and both caches, with what made them, so that it returns only to where it belongs.

Layout: magic, u32 length and JSON header, tokens (int32), target state, drafter state, SHA-256 of all before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from dspine_local import _native
from dspine_local.errors import ModelFormatError, PairingError
from dspine_local.files import need_regular

MAGIC = b"dspine-slot-1\n\0\0"
_SHA_BYTES = 32
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class SlotIdentity:
    """What a saved slot depends on; each value must be the same when it is restored."""

    target: str
    drafter: str
    cache: str
    versions: str


def file_fingerprint(path: str | Path) -> str:
    """SHA-256 (hex) of a model file's size, of its beginning, and of blocks spread evenly over it.

    Reads a quarter megabyte, whatever the size: enough to tell models and quantizations apart.
    """
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(struct.pack("<Q", size))
        for i in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def write_slot(path: Path, state: _native.SlotState, identity: SlotIdentity) -> int:
    """Write a slot under a temporary name, then rename it; the size in bytes.

    Raises:
        OSError: The folder cannot be written, or has no room.
    """
    tokens = np.asarray(state.tokens, dtype="<i4").tobytes()
    parts = {"tokens": tokens, "target_state": state.target, "drafter_state": state.drafter}
    header = json.dumps({**identity.__dict__, "bytes": {name: len(data) for name, data in parts.items()}}).encode()
    digest = hashlib.sha256()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            for data in (MAGIC, struct.pack("<I", len(header)), header, *parts.values()):
                digest.update(data)
                file.write(data)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return size


def read_slot(path: Path, identity: SlotIdentity) -> tuple[_native.SlotState, int]:
    """A saved slot and its size in bytes.

    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: Not a saved slot, or damaged.
        PairingError: It was saved by another model, drafter, cache type or version.
    """
    need_regular(path, "the saved slot")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256()
        if _take(file, len(MAGIC), digest, path) != MAGIC:
            raise ModelFormatError(f"'{path.name}' is not a saved slot")
        (n_header,) = struct.unpack("<I", _take(file, 4, digest, path))
        if n_header > _MAX_HEADER_BYTES:
            raise ModelFormatError(f"'{path.name}' is damaged: a header of {n_header} bytes")
        header = _parse_header(_take(file, n_header, digest, path), path)
        lengths = header["bytes"]
        if file.tell() + sum(lengths.values()) + _SHA_BYTES != size:
            raise ModelFormatError(f"'{path.name}' is damaged: {size} bytes, its header says otherwise")
        _compare(header, identity, path)
        tokens, target, drafter = (
            _take(file, lengths[name], digest, path) for name in ("tokens", "target_state", "drafter_state")
        )
        if file.read(_SHA_BYTES) != digest.digest():
            raise ModelFormatError(f"'{path.name}' is damaged: its checksum differs")
    return _native.SlotState(np.frombuffer(tokens, dtype="<i4").tolist(), target, drafter), size


def _take(file: IO[bytes], n: int, digest: Any, path: Path) -> bytes:
    data = file.read(n)
    if len(data) != n:
        raise ModelFormatError(f"'{path.name}' is damaged: it ends early")
    digest.update(data)
    return data


def _parse_header(data: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(data)
        lengths = header["bytes"]
        good = all(isinstance(lengths[n], int) and lengths[n] >= 0 for n in ("tokens", "target_state", "drafter_state"))
        if good and len(lengths) == 3 and lengths["tokens"] % 4 == 0:
            return dict(header)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ModelFormatError(f"'{path.name}' is damaged: its header cannot be read")


def _compare(header: dict[str, Any], identity: SlotIdentity, path: Path) -> None:
    for name, expected in identity.__dict__.items():
        found = header.get(name)
        if found != expected:
            raise PairingError(f"'{path.name}' was saved with another {name}: {found!r}, here it is {expected!r}")
