"""A target in another type, by llama.cpp's own quantizer, in a process that can be stopped at any time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from dspine_local import _native
from dspine_local.convert.writer import Progress
from dspine_local.errors import BackendError, ModelFormatError
from dspine_local.files import write_whole
from dspine_local.quantize.imatrix import ImportanceMatrix
from dspine_local.quantize.overrides import TypeOverride, check_all_used
from dspine_local.quantize.report import QuantizationReport
from dspine_local.quantize.source import check_first_time

# llama-quantize's short names.
_ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}
# Of ggml's types, those that nothing is quantized to: integers, and formats of intermediate results.
_NO_WEIGHTS = ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")
_TENSOR_TYPES = [name.lower() for name in gguf.GGMLQuantizationType.__members__ if name not in _NO_WEIGHTS]
TARGET_TYPES = {
    kind.name.split("_", 1)[1].lower(): kind for kind in gguf.LlamaFileType if kind is not gguf.LlamaFileType.GUESSED
}


def quantize_target(
    source: Path,
    out: Path,
    type_name: str,
    *,
    overrides: Sequence[TypeOverride] = (),
    imatrix: ImportanceMatrix | None = None,
    allow_requantize: bool = False,
    dry_run: bool = False,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> QuantizationReport:
    """Write a target in another type; of a split model, all of it in one file.

    Args:
        source: The target's GGUF; of a split model, its first part.
        out: A checked path (``output_path``).
        type_name: llama.cpp's name, such as ``Q4_K_M``.
        overrides: Of single tensors, the first that applies.
        imatrix: How much the columns of a tensor matter.
        allow_requantize: Take tensors that are quantized already: each time costs quality.
        dry_run: Only report.
        n_threads: 0 is one per core.
    Raises:
        ModelFormatError: The file is damaged.
        BackendError: llama.cpp refused; the message has its words.
        ValueError: An unknown type, an override that nothing has, or a quantized source.
    """
    name = _ALIASES.get(type_name.lower(), type_name.lower())
    if name not in TARGET_TYPES:
        raise ValueError(f"unknown type '{type_name}', expected one of {', '.join(TARGET_TYPES)}")
    before = _native.GgufFile(str(source)).tensors()
    check_all_used(overrides, [t.name for t in before])
    n_importance = None if imatrix is None else sum(t.name in imatrix for t in before)
    if n_importance == 0:
        raise ValueError("the importance matrix has no entry for any tensor of this target")
    for override in overrides:
        if override.type not in _TENSOR_TYPES:
            raise ValueError(
                f"unknown tensor type '{override.type}' for '{override.pattern}', expected one of "
                f"{', '.join(_TENSOR_TYPES)}"
            )
    run = _Run(str(source), int(TARGET_TYPES[name]), overrides, imatrix, n_threads)
    types = run.start(out, None, dry_run=True)
    for t in before:
        if types.get(t.name, t.type.lower()) != t.type.lower() and not allow_requantize:
            check_first_time(source, t.name, t.type.lower())
    if dry_run:
        tensors = _planned(before, types)
    else:
        write_whole(out, lambda partial: run.start(partial, progress))
        tensors = [_Stored(t.type.lower(), prod(t.shape), t.n_bytes) for t in _native.GgufFile(str(out)).tensors()]
    n_bytes = sum(t.n_bytes for t in tensors)
    return QuantizationReport(
        path=out,
        kind="target",
        type=name,
        n_tensors=len(tensors),
        bytes_before=sum(t.n_bytes for t in before),
        bytes_after=n_bytes,
        bits_per_weight=8 * n_bytes / sum(t.n_values for t in tensors),
        types=dict(Counter(t.type for t in tensors)),
        fallbacks=(),
        n_importance=n_importance,
        written=not dry_run,
    )


@dataclass(frozen=True)
class _Stored:
    type: str
    n_values: int
    n_bytes: int


@dataclass(frozen=True)
class _Run:
    """One call of llama.cpp's quantizer in a child process."""

    source: str
    file_type: int
    overrides: Sequence[TypeOverride]
    imatrix: ImportanceMatrix | None
    n_threads: int

    def start(self, out: Path, progress: Progress | None, *, dry_run: bool = False) -> dict[str, str]:
        """Run it to its end; the types of all tensors by name."""
        with tempfile.TemporaryDirectory() as folder:
            matrix = None
            if self.imatrix is not None:
                matrix = str(Path(folder) / "imatrix.npz")
                numbered = {str(i): values for i, values in enumerate(self.imatrix.values())}
                np.savez(matrix, allow_pickle=False, **numbered)  # its keywords would be names in the file
            return self._run(out, matrix, progress, dry_run)

    def _run(self, out: Path, matrix: str | None, progress: Progress | None, dry_run: bool) -> dict[str, str]:
        task = {
            "source": self.source,
            "file_type": self.file_type,
            "out": str(out),
            "dry_run": dry_run,
            "n_threads": self.n_threads or os.cpu_count() or 1,
            "overrides": [(o.pattern, o.type) for o in self.overrides],
            "imatrix": matrix,
            "imatrix_names": list(self.imatrix or ()),
        }
        types: dict[str, str] = {}
        error = ""
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
            subprocess.Popen(
                [sys.executable, "-m", "dspine_local.quantize.target_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Two threads that abort at once would each wait for the other's debugger.
                env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            ) as worker,
        ):
            assert worker.stdin is not None
            assert worker.stdout is not None
            try:
                json.dump(task, worker.stdin)
                worker.stdin.close()
                for line in worker.stdout:
                    if not line.startswith("{"):  # what a library prints
                        continue
                    entry: dict[str, Any] = json.loads(line)
                    error = entry.get("error", error)
                    if "tensor" in entry:
                        types[entry["tensor"]] = entry["type"]
                        if progress is not None:
                            progress(entry["done"], entry["total"], entry["tensor"])
                status = worker.wait()
                log.seek(0)
                words = log.read().strip().splitlines()
            except BaseException:
                worker.kill()
                raise
        if status < 0 or (status and not error):
            raise ModelFormatError(f"llama.cpp broke off at '{self.source}': {words[-1] if words else status}")
        if error:
            raise BackendError(f"llama.cpp could not quantize '{self.source}': {error}")
        return types


def _planned(before: Sequence[_native.TensorInfo], types: dict[str, str]) -> list[_Stored]:
    planned = []
    for t in before:
        name = types.get(t.name, t.type.lower())
        block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
        planned.append(_Stored(name, prod(t.shape), prod(t.shape) // block * n_bytes))
    return planned
