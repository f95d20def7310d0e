"""One conversion from start to end: open, check, plan, write, report."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from math import prod
from os import PathLike
from pathlib import Path

import gguf
import numpy as np

from dspine_local.convert.checkpoint import Checkpoint, open_checkpoint
from dspine_local.convert.config import DrafterConfig, read_config
from dspine_local.convert.outtypes import Fallback, OutType, parse_outtype
from dspine_local.convert.pairing import TargetIdentity, check_target
from dspine_local.convert.schema import ARCHITECTURE, Key
from dspine_local.convert.tensors import plan_tensors
from dspine_local.convert.writer import Progress, Value, add_key, choose_types, write_gguf
from dspine_local.files import checked_path, output_path


@dataclass(frozen=True)
class ConversionReport:
    """What was written. ``types`` counts tensors by stored type; ``n_bytes`` is the file's size."""

    path: Path
    name: str
    outtype: str
    injection: bool
    n_tensors: int
    n_parameters: int
    n_bytes: int
    types: dict[str, int]
    fallbacks: tuple[Fallback, ...]
    target: Path | None


def convert_checkpoint(
    checkpoint_dir: str | PathLike[str],
    out_path: str | PathLike[str],
    *,
    outtype: str = "q8_0",
    target: str | PathLike[str] | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> ConversionReport:
    """Convert a drafter checkpoint to a GGUF file. On any failure, no file is left or changed.

    Args:
        checkpoint_dir: Folder with ``config.json`` and safetensors files.
        out_path: The GGUF file to write; its folder must exist. A symbolic link stays one: its file is written.
        outtype: Type of the matrices, one of ``OUTTYPES``; norms and biases stay float32.
        target: GGUF of the target, to check against and to remember the vocabulary of.
        progress: Called with bytes done, bytes in all and the tensor's name.
        overwrite: Replace an existing output file. Never anything but a regular file.
    Raises:
        FileNotFoundError: The folder, a file of it, the target, or the output's folder is missing.
        FileExistsError: The output exists and ``overwrite`` is false.
        ModelFormatError: The checkpoint or the target is damaged or not supported.
        PairingError: The drafter was not made for the target.
        ValueError: Unknown ``outtype``, or an output that would replace an input or is no regular file.
    """
    wanted = parse_outtype(outtype)
    checkpoint = open_checkpoint(checked_path(checkpoint_dir))
    target_path = None if target is None else checked_path(target)
    _keep_inputs(checked_path(out_path), checkpoint, target_path)
    out = output_path(out_path, overwrite=overwrite, hint="give another name, or --force to replace it")
    config = read_config(checkpoint.config, checkpoint.config_file, {n: t.shape for n, t in checkpoint.tensors.items()})
    planned = plan_tensors(checkpoint, config)
    identity = None if target_path is None else check_target(target_path, config)
    outputs, fallbacks = choose_types(planned, wanted)
    name = _model_name(checkpoint)

    def add_metadata(writer: gguf.GGUFWriter) -> None:
        for key, value in metadata(config, name, wanted, identity):
            add_key(writer, key, value)

    n_bytes = write_gguf(out, ARCHITECTURE, add_metadata, outputs, progress)
    return ConversionReport(
        path=Path(out_path),
        name=name,
        outtype=wanted.name,
        injection=config.injection is not None,
        n_tensors=len(outputs),
        n_parameters=sum(prod(tensor.stored.shape) for tensor in planned),
        n_bytes=n_bytes,
        types=dict(Counter(tensor.type.name for tensor in outputs)),
        fallbacks=tuple(fallbacks),
        target=target_path,
    )


def metadata(
    config: DrafterConfig, name: str, outtype: OutType, target: TargetIdentity | None
) -> list[tuple[str, Value]]:
    """The GGUF's keys and values in file order, typed as ``schema.Key`` says."""
    u32, f32 = np.uint32, np.float32
    pairs: list[tuple[str, Value]] = [
        (Key.NAME, name),
        (Key.FILE_TYPE, u32(outtype.file_type)),
        (Key.QUANTIZATION_VERSION, u32(gguf.GGML_QUANT_VERSION)),
        (Key.BLOCK_COUNT, u32(config.n_layers)),
        (Key.EMBEDDING_LENGTH, u32(config.hidden_size)),
        (Key.FEED_FORWARD_LENGTH, u32(config.ffn_size)),
        (Key.CONTEXT_LENGTH, u32(config.context_length)),
        (Key.VOCAB_SIZE, u32(config.vocab_size)),
        (Key.BLOCK_SIZE, u32(config.block_size)),
        (Key.TARGET_LAYERS, [i + 1 for i in config.target_layer_ids]),
        (Key.HEAD_COUNT, u32(config.n_heads)),
        (Key.HEAD_COUNT_KV, u32(config.n_heads_kv)),
        (Key.KEY_LENGTH, u32(config.head_dim)),
        (Key.VALUE_LENGTH, u32(config.head_dim)),
        (Key.RMS_EPS, f32(config.rms_eps)),
        (Key.CAUSAL, config.causal),
        (Key.ROPE_DIMENSION_COUNT, u32(config.head_dim)),
        (Key.ROPE_FREQ_BASE, f32(config.rope.freq_base)),
        (Key.MASK_TOKEN_ID, u32(config.mask_token_id)),
        (Key.TARGET_BLOCK_COUNT, u32(config.n_target_layers)),
        (Key.TARGET_EMBEDDING_LENGTH, u32(config.hidden_size)),
        (Key.INJECTION, config.injection is not None),
    ]
    if config.injection is not None:
        pairs += [
            (Key.TRANSFER_RANK, u32(config.injection.rank)),
            (Key.MESSAGE_SIZE, u32(config.injection.message_size)),
            (Key.TOP_K, u32(config.injection.top_k)),
        ]
    if config.window > 0:
        pairs += [(Key.SLIDING_WINDOW, u32(config.window)), (Key.SLIDING_WINDOW_PATTERN, list(config.sliding))]
    scaling = config.rope.scaling
    pairs.append((Key.ROPE_SCALING_TYPE, scaling.type))
    if scaling.type != "none":
        pairs.append((Key.ROPE_SCALING_FACTOR, f32(scaling.factor)))
    if scaling.type == "yarn":
        pairs += [
            (Key.ROPE_SCALING_ORIG_CTX, u32(scaling.original_context_length)),
            (Key.ROPE_SCALING_ATTN_FACTOR, f32(scaling.attn_factor)),
            (Key.ROPE_SCALING_BETA_FAST, f32(scaling.beta_fast)),
            (Key.ROPE_SCALING_BETA_SLOW, f32(scaling.beta_slow)),
        ]
    if target is not None:
        pairs += [(Key.TARGET_ARCHITECTURE, target.architecture), (Key.TARGET_VOCAB_SHA256, target.vocab_sha256)]
    return pairs


def _keep_inputs(out: Path, checkpoint: Checkpoint, target: Path | None) -> None:
    inputs = {*checkpoint.files, checkpoint.config_file} | ({target} if target is not None else set())
    # Not Path.resolve, which raises for links in a circle.
    if os.path.realpath(out) in {os.path.realpath(path) for path in inputs}:
        raise ValueError(f"the output '{out}' would replace an input of the conversion")


def _model_name(checkpoint: Checkpoint) -> str:
    given = checkpoint.config.get("_name_or_path")
    name = Path(given).name if isinstance(given, str) else ""
    name = name.strip(". ") or checkpoint.folder.resolve().name
    return name.encode("utf-8", "replace").decode()
