"""One quantization from start to end: what the file is, what may be written, and by whom."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dspine_local import _native
from dspine_local.checks import need_integer
from dspine_local.convert.schema import ARCHITECTURE, Key
from dspine_local.convert.writer import Progress
from dspine_local.errors import ModelFormatError
from dspine_local.files import StrPath, checked_path, need_regular, output_path
from dspine_local.options import MAX_THREADS
from dspine_local.quantize.drafter import quantize_drafter
from dspine_local.quantize.imatrix import read_imatrix
from dspine_local.quantize.overrides import TypeOverride
from dspine_local.quantize.report import QuantizationReport
from dspine_local.quantize.target import quantize_target


def quantize_file(
    source: StrPath,
    out: StrPath,
    type_name: str,
    *,
    overrides: Sequence[TypeOverride] = (),
    imatrix: StrPath | None = None,
    allow_requantize: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> QuantizationReport:
    """Write a drafter or a target in another type. On any failure, no file is left or changed.

    Args:
        source: GGUF of either.
        out: File to write; its folder must exist.
        type_name: llama.cpp's name in any case, such as ``Q4_K_M`` or ``q8_0``.
        overrides: Types of single tensors.
        imatrix: llama.cpp's importance matrix, GGUF or its older format.
        allow_requantize: Take what is quantized already: each time costs quality.
        dry_run: Only report what would be written.
        overwrite: Replace an existing regular file.
        n_threads: For a target, 512 at most; 0 is one per core.
        progress: Called with what is done, all there is, and the tensor's name.
    Raises:
        FileNotFoundError: No such file, or the output's folder is missing.
        FileExistsError: The output exists and ``overwrite`` is false.
        ModelFormatError: The source or the importance matrix is damaged.
        BackendError: llama.cpp refused.
        ValueError: An unknown type, an override that nothing has, or the output is the source.
    """
    need_integer("n_threads", n_threads, 0, MAX_THREADS)
    path, written = checked_path(source), checked_path(out)
    need_regular(path, "the model to quantize")
    header = _native.GgufFile(str(path))
    inputs = {os.path.realpath(path)} | ({os.path.realpath(imatrix)} if imatrix is not None else set())
    if os.path.realpath(written) in inputs:
        raise ValueError(f"the output '{written}' would replace an input")
    if not dry_run:
        written = output_path(written, overwrite=overwrite, hint="give another name, or --force to replace it")
    architecture = header.get(Key.ARCHITECTURE) if Key.ARCHITECTURE in header.keys() else None  # noqa: SIM118
    if not isinstance(architecture, str):
        raise ModelFormatError(f"'{path}' names no architecture ({Key.ARCHITECTURE}), expected a model")
    matrix = None if imatrix is None else read_imatrix(checked_path(imatrix))
    if architecture == ARCHITECTURE:
        return quantize_drafter(
            *(path, written, type_name),
            overrides=overrides,
            imatrix=matrix,
            allow_requantize=allow_requantize,
            dry_run=dry_run,
            progress=progress,
        )
    return quantize_target(
        *(path, written, type_name),
        overrides=overrides,
        imatrix=matrix,
        allow_requantize=allow_requantize,
        dry_run=dry_run,
        n_threads=n_threads,
        progress=progress,
    )
