"""A sweep's folder: the drafters, and a file with what was measured so far."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspine_local.errors import ModelFormatError
from dspine_local.files import write_whole
from dspine_local.sweep.result import Sweep, TypeResult

NAME, FORMAT = "sweep.json", 1


def read_sweep(folder: Path, about: Mapping[str, Any]) -> Sweep:
    """What is on record there; nothing yet is a sweep without results.

    Raises:
        ModelFormatError: The record is damaged.
        ValueError: It is of another sweep; the message says what differs.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Sweep(about, ())
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"'{path}' cannot be read: {error}; delete it to start anew") from error
    try:
        found, results = content["about"], tuple(TypeResult.from_json(result) for result in content["results"])
        is_current = content["format"] == FORMAT
        names = [name for name in dict.fromkeys((*about, *found)) if found.get(name) != _plain(about.get(name))]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelFormatError(f"'{path}' is no record of a sweep ({error!r}); delete it to start anew") from error
    if names or not is_current:
        listed = ", ".join(_difference(name, found.get(name), _plain(about.get(name))) for name in names) or "format"
        raise ValueError(
            f"'{path}' is of another sweep ({listed}), expected the same; give another --out, or --force to start anew"
        )
    return Sweep(about, results)


def _difference(name: str, found: Any, now: Any) -> str:
    if isinstance(found, dict) and isinstance(now, dict):
        keys = [key for key in {**found, **now} if found.get(key) != now.get(key)]
        return ", ".join(f"{key} {found.get(key)!r}, now {now.get(key)!r}" for key in keys)
    return f"{name} {found!r}, now {now!r}"


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Replace the record, whole or not at all."""
    content = json.dumps({"format": FORMAT, **sweep.to_json()}, indent=1)
    write_whole(folder / NAME, lambda partial: partial.write_text(content, encoding="utf-8"))


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
