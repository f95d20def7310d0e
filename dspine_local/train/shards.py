"""Files that are there whole or not at all, and shards that several processes can share out among themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspine_local import files
from dspine_local.errors import ModelFormatError

try:
    import fcntl
except ImportError:  # Windows: one process at a time
    fcntl = None  # type: ignore[assignment]


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """The same as ``files.write_whole``, in a folder that need not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, write)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole."""
    write_whole(path, lambda partial: void(partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelFormatError: Not a regular file, or something else in it.
    """
    files.need_regular(path, "a file of the training's folder")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"'{path}' is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"'{path}' is damaged: it holds a {type(value).__name__}, expected an object")
    return value


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
