"""Where and how a run was measured: machine, versions, models and options, for the report."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import llama_cpp

from dspine_local import __version__
from dspine_local.bench.endpoint import Endpoint
from dspine_local.engine import Engine
from dspine_local.files import StrPath
from dspine_local.machine import memory_bytes, processor, source_commit
from dspine_local.summary import summarize


def describe_setting(
    engine: Engine, target: StrPath, drafter: StrPath | None, endpoints: Sequence[Endpoint], run: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain JSON values.

    Args:
        run: Options of the run itself, such as prompts and repetitions.
    """
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_bytes": memory_bytes(),
            "system": f"{platform.system()} {platform.machine()}",
            "load_average": os.getloadavg()[0],
        },
        "versions": {
            "dspine-local": __version__,
            "llama-cpp-python": llama_cpp.__version__,
            "python": platform.python_version(),
            "commit": source_commit(),
        },
        "target": _describe_file(target),
        "drafter": None if drafter is None else _describe_file(drafter),
        "device": None if engine.drafter is None else engine.drafter.device,
        "max_draft": engine.max_draft,
        "n_threads": engine.target.n_threads,
        "engine_options": asdict(engine.options),
        "endpoints": [{"name": e.name, "url": e.url, "model": e.model} for e in endpoints],
        "run": dict(run),
    }


def _describe_file(path: StrPath) -> dict[str, Any]:
    """A model without the folder that it lies in."""
    summary = summarize(path)
    return {
        "file": Path(path).name,
        "architecture": summary.architecture,
        "name": summary.name,
        "parameters": summary.n_parameters,
        "bytes": summary.file_bytes,
        "types": {t.type: t.n_bytes for t in summary.types},
    }
