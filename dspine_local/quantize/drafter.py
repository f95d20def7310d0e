"""A drafter in other types, streamed: one chunk of rows in memory, whatever the file's size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from dspine_local import _native
from dspine_local.convert.outtypes import OUTTYPES, Fallback, OutType, parse_outtype, type_for
from dspine_local.convert.schema import Key, Tensor
from dspine_local.convert.writer import OutputTensor, Progress, write_gguf
from dspine_local.errors import ModelFormatError
from dspine_local.quantize.imatrix import ImportanceMatrix
from dspine_local.quantize.overrides import TypeOverride, check_all_used
from dspine_local.quantize.report import QuantizationReport
from dspine_local.quantize.source import GgufTensorSource, check_first_time, tensor_sources

# Matrices that the loader stacks into one, of one type therefore (drafter_weights.cpp).
_STACKED = (
    (Tensor.ATTN_Q, Tensor.ATTN_K, Tensor.ATTN_V),
    (Tensor.FFN_GATE, Tensor.FFN_UP),
    (Tensor.INJECT_MESSAGE, Tensor.INJECT_GATE_PREDECESSOR),
)


def quantize_drafter(
    source: Path,
    out: Path,
    type_name: str,
    *,
    overrides: Sequence[TypeOverride] = (),
    imatrix: ImportanceMatrix | None = None,
    allow_requantize: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> QuantizationReport:
    """Write a drafter with its matrices in another type. Norms and biases stay float32.

    Args:
        source: The drafter's GGUF.
        out: A checked path (``output_path``).
        type_name: One of ``OUTTYPES``, or llama.cpp's mix of that name (``q4_k_m``).
        overrides: Of single matrices, the first that applies.
        imatrix: How much the columns of a tensor matter, where it has any.
        allow_requantize: Take matrices that are quantized already: each time costs quality.
        dry_run: Only report.
    Raises:
        ModelFormatError: The file is damaged.
        ValueError: An unknown type, an override that nothing has, one that splits a stack, or a quantized source.
    """
    wanted = _outtype(type_name)
    header = _native.GgufFile(str(source))
    sources = tensor_sources(source, header)
    check_all_used(overrides, [t.name for t in sources if len(t.shape) > 1])
    tensors, fallbacks = [], []
    for tensor in sources:
        chosen, fallback = _choose(tensor, wanted, overrides)
        fallbacks += [] if fallback is None else [fallback]
        if chosen.name != tensor.type_name and not allow_requantize:
            check_first_time(source, tensor.name, tensor.type_name)
        tensors.append(OutputTensor(tensor.name, tensor, chosen, _importance(tensor, imatrix)))
    _check_stacks(tensors)
    n_importance = None if imatrix is None else sum(tensor.importance is not None for tensor in tensors)
    if n_importance == 0:
        raise ValueError("the importance matrix has no entry for any tensor of this drafter")

    def add_metadata(writer: gguf.GGUFWriter) -> None:
        _copy_metadata(source, writer, wanted)

    if not dry_run:
        write_gguf(out, str(header.get(Key.ARCHITECTURE)), add_metadata, tensors, progress)
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    return QuantizationReport(
        path=out,
        kind="drafter",
        type=wanted.name,
        n_tensors=len(tensors),
        bytes_before=sum(tensor.n_bytes for tensor in sources),
        bytes_after=n_bytes,
        bits_per_weight=8 * n_bytes / sum(prod(tensor.shape) for tensor in sources),
        types=dict(Counter(tensor.type.name for tensor in tensors)),
        fallbacks=tuple(fallbacks),
        n_importance=n_importance,
        written=not dry_run,
    )


def _outtype(name: str) -> OutType:
    """llama.cpp's names of mixes stand for their main type: a drafter's matrices are all of one kind."""
    lower = name.lower()
    for suffix in ("_s", "_m", "_l"):
        if lower.removesuffix(suffix) in OUTTYPES:
            return OUTTYPES[lower.removesuffix(suffix)]
    return parse_outtype(lower)


def _choose(
    tensor: GgufTensorSource, wanted: OutType, overrides: Sequence[TypeOverride]
) -> tuple[OutType, Fallback | None]:
    if len(tensor.shape) == 1:
        return OUTTYPES["f32"], None
    chosen = next((_outtype(override.type) for override in overrides if override.applies(tensor.name)), wanted)
    got = type_for(tensor.shape[-1], chosen)
    return got, None if got is chosen else Fallback.for_rows(tensor.name, tensor.shape[-1], chosen, got)


def _importance(tensor: GgufTensorSource, imatrix: ImportanceMatrix | None) -> npt.NDArray[np.float32] | None:
    values = None if imatrix is None or len(tensor.shape) == 1 else imatrix.get(tensor.name)
    if values is not None and values.size != tensor.shape[-1]:
        raise ValueError(
            f"the importance matrix has {values.size} values for '{tensor.name}', expected {tensor.shape[-1]}"
        )
    return values


def _check_stacks(tensors: Sequence[OutputTensor]) -> None:
    types = {tensor.name: tensor.type.name for tensor in tensors}
    n_layers = sum(name.endswith(Tensor.ATTN_NORM.removeprefix("blk.{il}.")) for name in types)
    for stack in _STACKED:
        for il in range(n_layers):
            found = {name.format(il=il): types[name.format(il=il)] for name in stack if name.format(il=il) in types}
            if len(set(found.values())) > 1:
                listed = ", ".join(f"{name} {type_name}" for name, type_name in found.items())
                raise ValueError(f"matrices that are used together need one type, found {listed}")


def _copy_metadata(source: Path, writer: gguf.GGUFWriter, wanted: OutType) -> None:
    replaced = {Key.FILE_TYPE: int(wanted.file_type), Key.QUANTIZATION_VERSION: gguf.GGML_QUANT_VERSION}
    try:
        fields = gguf.GGUFReader(source).fields.values()
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"'{source}' has metadata that cannot be copied: {error}") from error
    for field in fields:
        if field.name.startswith("GGUF.") or field.name == Key.ARCHITECTURE:
            continue
        if field.name in replaced:
            writer.add_uint32(field.name, replaced[field.name])
        else:
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
