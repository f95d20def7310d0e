"""Audits in the user's cache: one file for each model file, machine and way to load it, beside the measured costs."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp

from dspine_local import _native
from dspine_local.audit.result import AuditResult
from dspine_local.costs import cache_folder
from dspine_local.files import write_whole
from dspine_local.machine import processor
from dspine_local.options import EngineOptions
from dspine_local.slot_files import file_fingerprint

FORMAT = 1

_log = logging.getLogger(__name__)


def read_audit(target: _native.Target, options: EngineOptions) -> AuditResult | None:
    """What is on record for exactly this file, loaded exactly so; None for nothing, and, with a warning, for damage."""
    about = _about(target, options)
    path = _file(about)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("the audit on record cannot be read, and is not used: %s", error)
        return None
    try:
        content = json.loads(text)
        if content["format"] != FORMAT or content["about"] != json.loads(json.dumps(about)):
            raise ValueError("of another format or configuration")
        return AuditResult.from_json(content["result"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _log.warning("the audit on record in '%s' is damaged, and not used (%s: %s)", path, type(error).__name__, error)
        return None


def write_audit(target: _native.Target, options: EngineOptions, result: AuditResult) -> Path | None:
    """Keep an audit together with older ones, whole or not at all; where. None, with a warning, when that fails."""
    about = _about(target, options)
    path = _file(about)
    known = read_audit(target, options)
    if known is not None:
        result = known.joined(result)
    content = json.dumps({"format": FORMAT, "about": about, "result": result.to_json()}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda partial: partial.write_text(content, encoding="utf-8"))
    except OSError as error:
        _log.warning("the audit could not be kept in '%s': %s", path, error)
        return None
    return path


def _file(about: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "audits" / f"{key}.json"


def _about(target: _native.Target, options: EngineOptions) -> dict[str, Any]:
    """All that a logit's last bits may depend on, beside the tokens."""
    return {
        "target": file_fingerprint(target.path),
        "machine": [platform.node(), platform.machine(), processor(), os.cpu_count()],
        "devices": [list(device[:2]) for device in _native.devices()],
        "threads": [target.n_threads, target.n_threads_batch],
        "slots": target.n_seq,
        "snapshots": target.n_rollback if target.is_recurrent else 0,  # part of a recurrent target's graph
        "layouts": _native.cpu_layouts_work(),
        "options": {
            name: getattr(options, name)
            for name in (
                *("n_gpu_layers", "devices", "split_mode", "tensor_split"),
                *("flash_attn", "cache_type_k", "cache_type_v", "use_mmap"),
            )
        },
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("GGML_")},
        "build": [llama_cpp.__version__, _build()],
    }


@cache
def _build() -> str:
    """Of the libraries that compute: one version of them may be compiled in many ways."""
    folder = Path(llama_cpp.__file__).parent / "lib"
    files = {path.resolve() for path in folder.iterdir() if path.is_file()}
    prints = [[path.name, file_fingerprint(path)] for path in sorted(files)]
    return hashlib.sha256(json.dumps(prints).encode()).hexdigest()[:16]
