"""Paths that commands read and write: checked before the work begins, and files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from dspine_local.errors import ModelFormatError

StrPath = str | os.PathLike[str]


def checked_path(path: StrPath) -> Path:
    """The path, if the operating system and the native side can take it.

    Raises:
        ValueError: A NUL character, or a name that is not UTF-8.
    """
    text = os.fspath(path)
    if "\0" in text:
        raise ValueError(f"the path {text!r} has a NUL character, expected none")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the path {text!r} is not valid UTF-8 at character {error.start}, expected UTF-8") from error
    return Path(path)


def output_path(path: StrPath, *, overwrite: bool, hint: str = "give another name") -> Path:
    """Where a command will write: the path itself, or the file that it is a symbolic link to.

    Nothing but a regular file is ever replaced: a FIFO, a socket or a device is none, and a link stays a link.

    Args:
        overwrite: Whether a regular file may be replaced.
        hint: What to do about one that may not, for the message.
    Raises:
        FileNotFoundError: The output's folder is missing.
        FileExistsError: There is such a file, and ``overwrite`` is false.
        ValueError: There is something else, a link to nothing, or a NUL character.
    """
    out = checked_path(path)
    if not out.parent.is_dir():
        raise FileNotFoundError(f"no such folder: '{out.parent}' (for the output '{out.name}')")
    if not os.path.lexists(out):
        return out
    try:
        mode = out.stat().st_mode
    except OSError as error:  # only a link can be there and lead nowhere
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        raise ValueError(f"the output '{out}' is a symbolic link to nothing, expected a file name") from error
    if stat.S_ISDIR(mode):
        raise ValueError(f"the output '{out}' is a folder, expected a file name")
    if not stat.S_ISREG(mode):
        raise ValueError(f"the output '{out}' is {_kind(mode)}, expected a regular file or a new name")
    if not overwrite:
        raise FileExistsError(f"'{out}' exists; {hint}")
    return out.resolve() if out.is_symlink() else out


def output_folder(path: StrPath) -> Path:
    """A folder that a command will write into; it may not exist yet.

    Raises:
        ValueError: Something else has that name, or a part of it.
    """
    folder = checked_path(path)
    for part in (folder, *folder.parents):
        if os.path.lexists(part):
            if not part.is_dir():
                raise ValueError(f"'{part}' is not a folder, expected one for the output '{folder}'")
            break
    return folder


def need_regular(path: Path, what: str) -> None:
    """Refuse anything but a regular file, or a link to one, before it is opened: a FIFO would wait for ever.

    Args:
        what: The file's part, for the message, such as "the checkpoint's config".
    Raises:
        FileNotFoundError: No such file.
        ModelFormatError: Not a regular file.
    """
    checked_path(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no such file: '{path}' ({what})") from error
    if not stat.S_ISREG(mode):
        raise ModelFormatError(f"'{path}' is {_kind(mode)}, expected a regular file ({what})")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a temporary file, then rename it to ``path``: a killed process leaves no half file there."""
    # A new file of an unknown name: nobody can have put a link there. Short, since names have a longest length.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:40]}.", suffix=".tmp")
    os.close(handle)
    partial = Path(name)
    try:
        partial.chmod(0o666 & ~_umask())
        mode = stat.S_IMODE(partial.stat().st_mode)  # what the user's files have: safetensors makes private ones
        write(partial)
        partial.chmod(mode)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "no file")
