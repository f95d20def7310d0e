"""Published models' shapes as GGUF headers without data, so that a plan needs no download."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import gguf
import numpy as np

from dspine_local._native import quantized_types, type_layout
from dspine_local.convert.config import DrafterConfig, Injection
from dspine_local.convert.outtypes import OUTTYPES, parse_outtype, type_for
from dspine_local.convert.rope import Rope, RopeScaling
from dspine_local.convert.run import metadata
from dspine_local.convert.schema import ARCHITECTURE
from dspine_local.convert.tensors import backbone, injection
from dspine_local.convert.writer import add_key
from dspine_local.planning.measure import PlannedFiles


@dataclass(frozen=True)
class DeltaShape:
    """The gated delta net layers of a hybrid model; every fourth layer has full attention instead."""

    n_key_heads: int
    n_value_heads: int
    head_dim: int
    conv_kernel: int


@dataclass(frozen=True)
class ModelShape:
    """A target's published config, and where it was published."""

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    tied: bool
    rope_dims: int
    delta: DeltaShape | None
    source: str


SHAPES = {
    "qwen3-4b": ModelShape(
        *("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 40960, True, 128, None),
        "https://huggingface.co/Qwen/Qwen3-4B/blob/main/config.json",
    ),
    "qwen3-8b": ModelShape(
        *("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960, False, 128, None),
        "https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json",
    ),
    "qwen3.8-27b": ModelShape(
        *("qwen35", 64, 5120, 17408, 24, 4, 256, 248320, 262144, False, 64),
        DeltaShape(n_key_heads=16, n_value_heads=48, head_dim=128, conv_kernel=4),
        "https://huggingface.co/Qwen/Qwen3.8-27B/blob/main/config.json (text_config)",
    ),
}
# What the published Qwen3-8B drafter has beside the target's width, feed-forward width and vocabulary; the others are
# taken to be alike.
DRAFTER_LAYERS = DRAFTER_TAPS = 5
DRAFTER_HEADS, DRAFTER_HEADS_KV, DRAFTER_HEAD_DIM = 32, 8, 128
DRAFTER_INJECTION = Injection(rank=1024, message_size=512, top_k=16)
BLOCK_SIZE = 16

Tensors = Sequence[tuple[str, Sequence[int]]]  # names and shapes, [rows, columns]


def write_shape(name: str, quant: str, drafter: str | None, folder: Path) -> PlannedFiles:
    """Write headers of a published target and its drafter. The files look whole, but have no data on the disk.

    Args:
        name: One of ``SHAPES``.
        quant: The target's file type, such as Q4_K_M.
        drafter: The drafter's type, such as q8_0; None for no drafter.
    Raises:
        ValueError: No such shape or type.
    """
    shape = SHAPES.get(name.lower())
    if shape is None:
        raise ValueError(f"unknown model shape '{name}', expected one of {', '.join(SHAPES)}")
    target = folder / "target.gguf"
    _write_target(target, shape, _file_type(quant))
    if drafter is None:
        return PlannedFiles(str(target), None)
    path = folder / "drafter.gguf"
    _write_drafter(path, shape, drafter)
    return PlannedFiles(str(target), str(path))


def _file_type(name: str) -> gguf.LlamaFileType:
    known = {member.name.removeprefix("MOSTLY_").removeprefix("ALL_"): member for member in gguf.LlamaFileType}
    found = known.get(name.upper())
    if found is None or found is gguf.LlamaFileType.GUESSED:
        raise ValueError(f"unknown quantization '{name}', expected one of {', '.join(known)}")
    return found


def _write_target(path: Path, shape: ModelShape, file_type: gguf.LlamaFileType) -> None:
    tensors = target_tensors(shape)
    widths = [shape.n_layer, shape.n_embd, shape.n_ff, shape.n_head, shape.n_head_kv, shape.head_dim]
    types = quantized_types(shape.arch, widths, [(n, list(reversed(s))) for n, s in tensors], int(file_type))
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(shape.rope_dims)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_tokenizer_model("no_vocab")
    if shape.delta is not None:
        writer.add_ssm_conv_kernel(shape.delta.conv_kernel)
        writer.add_ssm_inner_size(shape.delta.n_value_heads * shape.delta.head_dim)
        writer.add_ssm_state_size(shape.delta.head_dim)
        writer.add_ssm_time_step_rank(shape.delta.n_value_heads)
        writer.add_ssm_group_count(shape.delta.n_key_heads)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    _write_sparse(writer, path, tensors, types)


def target_tensors(shape: ModelShape) -> Tensors:
    """Names and shapes of a target's tensors, as llama.cpp's converter names them."""
    d, f = shape.n_embd, shape.n_ff
    q, kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    tensors: list[tuple[str, Sequence[int]]] = [("token_embd.weight", (shape.n_vocab, d)), ("output_norm.weight", (d,))]
    if not shape.tied:
        tensors.append(("output.weight", (shape.n_vocab, d)))
    for il in range(shape.n_layer):
        parts: list[tuple[str, Sequence[int]]] = [
            ("attn_norm.weight", (d,)),
            ("ffn_norm.weight" if shape.delta is None else "post_attention_norm.weight", (d,)),
            ("ffn_gate.weight", (f, d)),
            ("ffn_up.weight", (f, d)),
            ("ffn_down.weight", (d, f)),
        ]
        if shape.delta is not None and (il + 1) % 4:
            parts += _delta_tensors(shape.delta, d)
        else:
            parts += [
                ("attn_q.weight", (q if shape.delta is None else 2 * q, d)),  # with the output gate
                ("attn_k.weight", (kv, d)),
                ("attn_v.weight", (kv, d)),
                ("attn_output.weight", (d, q)),
                ("attn_q_norm.weight", (shape.head_dim,)),
                ("attn_k_norm.weight", (shape.head_dim,)),
            ]
        tensors += [(f"blk.{il}.{name}", size) for name, size in parts]
    return tensors


def _delta_tensors(delta: DeltaShape, d: int) -> list[tuple[str, Sequence[int]]]:
    value = delta.n_value_heads * delta.head_dim
    mixed = 2 * delta.n_key_heads * delta.head_dim + value
    return [
        ("attn_qkv.weight", (mixed, d)),
        ("attn_gate.weight", (value, d)),
        ("ssm_conv1d.weight", (mixed, delta.conv_kernel)),
        ("ssm_dt.bias", (delta.n_value_heads,)),
        ("ssm_a", (delta.n_value_heads,)),
        ("ssm_beta.weight", (delta.n_value_heads, d)),
        ("ssm_alpha.weight", (delta.n_value_heads, d)),
        ("ssm_norm.weight", (delta.head_dim,)),
        ("ssm_out.weight", (d, value)),
    ]


def _write_drafter(path: Path, shape: ModelShape, quant: str) -> None:
    wanted = parse_outtype(quant)
    config = drafter_config(shape)
    mappings = [*backbone(config), *injection(config, DRAFTER_INJECTION, "codes")]
    types = [OUTTYPES["f32"] if len(m.shape) == 1 else type_for(m.shape[-1], wanted) for m in mappings]
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    for key, value in metadata(config, "shape", wanted, None):
        add_key(writer, key, value)
    _write_sparse(writer, path, [(m.name, m.shape) for m in mappings], [t.name for t in types])


def drafter_config(shape: ModelShape) -> DrafterConfig:
    """The config of a target's drafter, by the recipe of the published one for Qwen3-8B."""
    last = shape.n_layer - 3
    return DrafterConfig(
        n_layers=DRAFTER_LAYERS,
        hidden_size=shape.n_embd,
        ffn_size=shape.n_ff,
        context_length=shape.n_ctx,
        vocab_size=shape.n_vocab,
        block_size=BLOCK_SIZE,
        n_heads=DRAFTER_HEADS,
        n_heads_kv=DRAFTER_HEADS_KV,
        head_dim=DRAFTER_HEAD_DIM,
        rms_eps=1e-6,
        rope=Rope(1e6, RopeScaling()),
        causal=True,
        window=0,
        sliding=(False,) * DRAFTER_LAYERS,
        n_target_layers=shape.n_layer,
        target_layer_ids=tuple(1 + i * (last - 1) // (DRAFTER_TAPS - 1) for i in range(DRAFTER_TAPS)),
        mask_token_id=shape.n_vocab - 1,
        injection=DRAFTER_INJECTION,
    )


def _write_sparse(writer: gguf.GGUFWriter, path: Path, tensors: Tensors, types: Sequence[str]) -> None:
    """Header and tensor list; the data's place is a hole in the file."""
    n_data = 0
    for (name, size), type_name in zip(tensors, types, strict=True):
        n_values, n_bytes = type_layout(type_name)
        n_bytes *= prod(size) // n_values
        raw = gguf.GGMLQuantizationType[type_name.upper()]
        writer.add_tensor_info(name, size, np.dtype(np.float32), n_bytes, raw_dtype=raw)
        n_data += _aligned(n_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, _aligned(path.stat().st_size) + n_data)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT
