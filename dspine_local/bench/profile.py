"""Acceptance profiles: how often a drafter of a given quality is right, by draft position."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine_local.checks import OptionError, decode_utf8, need_collection, need_integer, need_number
from dspine_local.errors import ModelFormatError
from dspine_local.files import checked_path, need_regular

PAPER = "arXiv 2609.36173"
# Mean emitted tokens per round and block size: all that is published of these drafters.
PUBLISHED: Mapping[str, tuple[float, int]] = {"qwen3-8b": (4.82, 16), "dflash-qwen3-8b": (3.77, 16)}
KEYS = ("name", "source", "acceptance", "mean_emitted", "block_size")


@dataclass(frozen=True)
class AcceptanceProfile:
    """``acceptance[i]``: probability that a draft's token i is right given that all before it are; 0 beyond its end."""

    name: str
    source: str
    acceptance: tuple[float, ...]

    def mean_emitted(self, n_draft: int) -> float:
        """Tokens per round to be expected of drafts of this length, the one that verifying adds included."""
        return 1 + sum(math.prod(self.acceptance[: i + 1]) for i in range(min(n_draft, len(self.acceptance))))


def constant_acceptance(mean_emitted: float, block_size: int) -> tuple[float, ...]:
    """The one probability for every position that gives this mean.

    Args:
        mean_emitted: Tokens per round, 1 to block_size.
        block_size: Anchor and drafted tokens.
    Returns:
        It, block_size - 1 times.
    """
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        if math.fsum(middle**i for i in range(block_size)) < mean_emitted:
            low = middle
        else:
            high = middle
    return (high,) * (block_size - 1)


def load_profile(name: str) -> AcceptanceProfile:
    """A published profile by its name, or one from a JSON file (docs/benchmarking.md).

    Raises:
        FileNotFoundError: Neither a name nor a file.
        ModelFormatError: The file is not a profile.
    """
    if name in PUBLISHED:
        mean, block_size = PUBLISHED[name]
        return AcceptanceProfile(name, PAPER, constant_acceptance(mean, block_size))
    path = checked_path(name)
    need_regular(path, f"an acceptance profile, or one of {', '.join(PUBLISHED)}")
    try:
        content = json.loads(decode_utf8(f"'{path}'", path.read_bytes()))
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"'{path}' is not JSON: {error}") from error
    try:
        return _parse(content, path)
    except OptionError as error:
        raise ModelFormatError(f"'{path}': {error}") from error


def _parse(content: Any, path: Path) -> AcceptanceProfile:
    if not isinstance(content, dict):
        raise OptionError("profile", content, "a JSON object")
    for key in content:
        if key not in KEYS:
            raise OptionError("key", key, f"one of {', '.join(KEYS)}")
    texts = {"name": path.stem, "source": str(path)} | {k: content[k] for k in ("name", "source") if k in content}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise OptionError(key, text, "text")
    given = [key for key in ("acceptance", "mean_emitted", "block_size") if key in content]
    if given == ["acceptance"]:
        acceptance = need_collection("acceptance", content["acceptance"], "probabilities, one per draft position")
        for probability in acceptance:
            need_number("acceptance", probability, 0.0, 1.0)
        if not acceptance:
            raise OptionError("acceptance", acceptance, "at least one probability")
        return AcceptanceProfile(texts["name"], texts["source"], tuple(map(float, acceptance)))
    if given == ["mean_emitted", "block_size"]:
        need_integer("block_size", content["block_size"], 2)
        need_number("mean_emitted", content["mean_emitted"], 1.0, content["block_size"])
        acceptance = constant_acceptance(content["mean_emitted"], content["block_size"])
        return AcceptanceProfile(texts["name"], texts["source"], acceptance)
    raise OptionError("keys", given, "either acceptance, or mean_emitted and block_size")
