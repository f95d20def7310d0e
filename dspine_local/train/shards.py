"""Files that are there whole or not at all, and shards that several processes can share out among themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: one process at a time
    fcntl = None  # type: ignore[assignment]


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` make a temporary file, then rename it to ``path``: a killed process leaves no half file there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole."""
    write_whole(path, lambda partial: void(partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")))


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def void(_value: object) -> None:
    """Drop a value where none is wanted."""


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether this process may make ``path``: false while another one does. A claim ends with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    if fcntl is None:
        yield True
        return
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
