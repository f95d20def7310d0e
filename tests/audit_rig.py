"""The rig of the audit's tests: settings that are exact, results that are made up, and the record of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dspine_local import Engine, EngineOptions, SamplingOptions
from dspine_local.audit import AuditResult, BatchResult, BlockCount
from dspine_local.audit.record import write_audit
from dspine_local.cli import main

Row = npt.NDArray[np.float32]
Pair = tuple[Path, Path]

PROMPT = "The quick brown fox"
GREEDY = SamplingOptions(temperature=0)
SIZES = range(2, 17)
# Settings under which the tiny q8_0 targets give the same bits in all batches, at all positions.
EXACT: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "flash_attn": "on", "n_ubatch": 32}


def result_of(lengths: dict[int, tuple[int, ...]]) -> AuditResult:
    """As if these draft lengths had been found exact in the blocks that begin there, and nowhere else."""
    batches = []
    for length in range(1, 16):
        blocks = tuple(
            BlockCount(first, 64, 64 if first in lengths.get(length, ()) else 3) for first in range(0, 512, 256)
        )
        same = sum(block.identical for block in blocks)
        batches.append(BatchResult(length + 1, 128, same, 0.5, 0.1, (), blocks))
    return AuditResult(256, True, tuple(batches))


def keep(models: Pair, result: AuditResult, **options: Any) -> None:
    """Put a record where a strict engine with these options looks for it."""
    settings = EngineOptions(**(EXACT | {"n_draft": 15} | options))
    assert write_audit(Engine(*models, settings).target, settings, result) is not None


def records(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "dspine-local" / "audits").iterdir())


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err
