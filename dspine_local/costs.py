"""What target and drafter cost on this machine: measured once per pairing and setting, then kept in the user's cache.

The engine corrects the figures while it runs; these are where it begins.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import platformdirs

from dspine_local import _native
from dspine_local.files import write_whole
from dspine_local.machine import processor
from dspine_local.options import EngineOptions

SWEEP_S = 1.5  # seconds that measuring may take; slow models are measured at fewer lengths
FORMAT = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftCosts:
    """Pairs of columns and microseconds: of the target's decode by tokens, of the drafter by draft length."""

    verify: list[tuple[int, float]]
    draft: list[tuple[int, float]]


def draft_costs(
    target: _native.Target, drafter: _native.Drafter, paths: tuple[str, str], options: EngineOptions
) -> DraftCosts:
    """The costs from the cache, or measured now and cached. Empties both models' caches.

    Args:
        paths: Files of target and drafter.
    """
    about = _about(target, drafter, paths, options)
    path = _cache_file(about)
    known = _read(path)
    if known is not None:
        return known
    verify, draft = _native.measure_costs(target, drafter, budget_s=SWEEP_S)
    costs = DraftCosts(verify, draft)
    content = {"format": FORMAT, "about": about, "verify": verify, "draft": draft}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda partial: partial.write_text(json.dumps(content, indent=1), encoding="utf-8"))
    except OSError as error:  # they are measured again next time
        _log.warning("the measured costs could not be kept in '%s': %s", path, error)
    return costs


def _about(
    target: _native.Target, drafter: _native.Drafter, paths: tuple[str, str], options: EngineOptions
) -> dict[str, Any]:
    """All that the costs depend on."""
    return {
        "target": _layout(paths[0]),
        "drafter": _layout(paths[1]),
        "machine": [platform.node(), platform.machine(), processor(), os.cpu_count()],
        "device": drafter.device,
        "devices": [device[:2] for device in _native.devices()],
        "order": drafter.order,
        "threads": target.n_threads,
        "slots": target.n_seq,
        "options": [
            options.n_gpu_layers,
            options.devices,
            options.split_mode,
            options.tensor_split,
            options.flash_attn,
            options.cache_type_k,
            options.cache_type_v,
            options.cache_type_drafter,
        ],
        "versions": [llama_cpp.__version__, FORMAT],
    }


def _layout(path: str) -> str:
    """A hash of a model's tensors: names, types and shapes, not values."""
    tensors = [[t.name, t.type, list(t.shape)] for t in _native.GgufFile(path).tensors()]
    return hashlib.sha256(json.dumps(sorted(tensors)).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """The user's cache: what was measured on this machine."""
    return Path(platformdirs.user_cache_dir("dspine-local", appauthor=False))


def _cache_file(about: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{key}.json"


def _read(path: Path) -> DraftCosts | None:
    """What a cache file says; None for one that is missing, damaged or of another format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        costs = DraftCosts(*([(int(n), float(us)) for n, us in content[name]] for name in ("verify", "draft")))
        _native.DraftLengthPolicy(costs.verify, costs.draft)  # refuses costs that make no sense
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return costs if content.get("format") == FORMAT else None
