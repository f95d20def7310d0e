"""Tiny random target models: complete GGUF files that llama.cpp loads, tokenizes with and decodes.

Four architectures: ``llama`` and ``qwen3`` (dense), ``qwen35`` (gated delta net, every fourth layer full attention),
``qwen3moe`` (eight experts, two of them used).
The weights are random, but scaled so that greedy text wanders and its top logits stand apart. Same logits however
tokens are batched: q8_0 with flash attention and fewer than 64 tokens per ubatch (bit for bit), or f32 with flash
attention off and an f32 cache (to 1e-4). Elsewhere these models turn rounding into differences of 1e-2 to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

Array = npt.NDArray[Any]

ARCHITECTURES = ("llama", "qwen3", "qwen35", "qwen3moe")
N_EXPERTS, N_EXPERTS_USED = 8, 2
UNTAPPED = "smollm3"  # llama's tensors, but llama.cpp does not give its layers' inputs
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
# Multi-byte pieces first: half a character is a token too, as in real vocabularies.
TEXT_PIECES = (
    "你好 世界 日本 😀 🎉 é ü ñ Ω the ing er an in on re or at en ion tion is it he st nd ou th and you that for are "
    "with this have not but what all were when we there can said which do how if will up other about out many them"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QTYPES = {"f32": GGMLQuantizationType.F32, "q8_0": GGMLQuantizationType.Q8_0}


@dataclass(frozen=True)
class TinyTarget:
    """A written target: what a test needs to know about the file."""

    path: Path
    arch: str
    qtype: str
    n_vocab: int
    n_embd: int
    n_layer: int
    tied: bool

    @property
    def eos_id(self) -> int:
        return self.token_id("<|im_end|>")

    @property
    def mask_id(self) -> int:
        return self.token_id("<|mask|>")

    def token_id(self, special: str) -> int:
        """The id of a special token; they are the vocabulary's last."""
        return self.n_vocab - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(special)

    def matrices(self) -> tuple[Array, Array]:
        """The token embedding and the output matrix as llama.cpp uses them, float32 [n_vocab, n_embd]."""
        tensors = {t.name: t for t in gguf.GGUFReader(self.path).tensors}
        embed = tensors["token_embd.weight"]
        used = (embed, tensors.get("output.weight", embed))
        embed_values, head_values = (gguf.quants.dequantize(t.data, t.tensor_type) for t in used)
        return embed_values, head_values


def byte_to_unicode() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def vocabulary(n_vocab: int) -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and token types: 256 bytes, merged pieces up to the size asked for, special tokens last."""
    n_text = n_vocab - len(SPECIAL_TOKENS)
    if n_text < 257:
        raise ValueError(f"n_vocab must be at least {257 + len(SPECIAL_TOKENS)}, got {n_vocab}")
    symbols = byte_to_unicode()
    tokens = dict.fromkeys(symbols.values())
    merges: list[str] = []
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [form for piece in TEXT_PIECES.split() for form in (piece, " " + piece)] + [
        a + b for a in letters for b in letters
    ]
    for piece in pieces:
        whole = "".join(symbols[b] for b in piece.encode())
        for end in range(2, len(whole) + 1):
            if len(tokens) < n_text and whole[:end] not in tokens:
                tokens[whole[:end]] = None
                merges.append(f"{whole[: end - 1]} {whole[end - 1]}")
    if len(tokens) < n_text:
        raise ValueError(f"n_vocab can be at most {len(tokens) + len(SPECIAL_TOKENS)}, got {n_vocab}")
    types = [TokenType.NORMAL] * n_text + [TokenType.CONTROL] * len(SPECIAL_TOKENS)
    return [*tokens, *SPECIAL_TOKENS], merges, [int(t) for t in types]


def write_tiny_target(
    path: Path | str,
    arch: str,
    *,
    seed: int = 0,
    qtype: str = "f32",
    n_vocab: int = 384,
    n_embd: int = 64,
    n_layer: int | None = None,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_ff: int = 160,
    tied: bool = False,
    n_ctx_train: int = 4096,
    special_gain: float = 0.2,
) -> TinyTarget:
    """Write a random target model.

    Args:
        path: The ``.gguf`` file to write.
        arch: llama, qwen3, qwen35 or qwen3moe; smollm3 for a target that no drafter can tap.
        qtype: Stored type of the matrices, f32 or q8_0; norms, biases and convolutions stay float32.
        n_layer: Layers; 4, or 8 for qwen35, when None.
        tied: Leave out ``output.weight``, so that the token embedding serves as output matrix.
        special_gain: Scale of the special tokens' output rows. Small: never generated; 2: the end token comes soon.
    Raises:
        ValueError: Unknown architecture or type, or a width that q8_0 blocks of 32 do not divide.
    """
    if arch not in (*ARCHITECTURES, UNTAPPED) or qtype not in QTYPES:
        raise ValueError(f"arch must be one of {ARCHITECTURES}, qtype of {tuple(QTYPES)}, got {arch!r}, {qtype!r}")
    if any(width % 32 for width in (n_embd, n_head * head_dim, n_ff)):
        raise ValueError("n_embd, n_head * head_dim and n_ff must be multiples of 32")
    n_layer = n_layer or (8 if arch == "qwen35" else 4)
    writer = GGUFWriter(path, arch)
    writer.add_name(f"tiny {arch}")
    writer.add_file_type(7 if qtype == "q8_0" else 0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(n_layer)
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_vocab_size(n_vocab)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    target = TinyTarget(Path(path), arch, qtype, n_vocab, n_embd, n_layer, tied)
    add_vocabulary(writer, target)

    weights = RandomWeights(writer, np.random.default_rng(seed), QTYPES[qtype])
    special = np.ones((n_vocab, 1), np.float32)
    special[-len(SPECIAL_TOKENS) :] = special_gain
    weights.matrix("token_embd", n_vocab, n_embd, gain=math.sqrt(n_embd), row_gain=special if tied else None)
    if not tied:
        weights.matrix("output", n_vocab, n_embd, gain=3.0, row_gain=special)
    # Random signs: a token's own embedding then gives its own logit no head start, even in a tied model.
    signs = weights.rng.choice([-1.0, 1.0], n_embd)
    weights.vector("output_norm.weight", signs * (3.0 / math.sqrt(n_embd) if tied else 1.0))
    q_size, kv_size = n_head * head_dim, n_head_kv * head_dim
    if arch == "qwen3moe":
        writer.add_expert_count(N_EXPERTS)
        writer.add_expert_used_count(N_EXPERTS_USED)
        writer.add_expert_feed_forward_length(n_ff)
    if arch == "qwen35":
        delta = DeltaNet(n_value_heads=4, n_key_heads=2, state_size=32)
        delta.add_keys(writer, head_dim)
    for il in range(n_layer):
        blk = f"blk.{il}."
        weights.norm(blk + "attn_norm.weight", n_embd)
        weights.norm(blk + ("post_attention_norm.weight" if arch == "qwen35" else "ffn_norm.weight"), n_embd)
        if arch == "qwen35" and (il + 1) % 4:
            delta.add_tensors(weights, blk, n_embd)
        else:
            # Sharp attention: the next token depends on the distant past, so greedy text does not cycle.
            has_norms = arch in ("qwen3", "qwen35", "qwen3moe")
            sharp = 1.0 if has_norms else 2.0
            weights.matrix(blk + "attn_q", (2 if arch == "qwen35" else 1) * q_size, n_embd, gain=sharp)
            weights.matrix(blk + "attn_k", kv_size, n_embd, gain=sharp)
            weights.matrix(blk + "attn_v", kv_size, n_embd, gain=2.0)
            weights.matrix(blk + "attn_output", n_embd, q_size, gain=2.0)
            if has_norms:
                weights.norm(blk + "attn_q_norm.weight", head_dim, gain=2.0)
                weights.norm(blk + "attn_k_norm.weight", head_dim, gain=2.0)
        if arch == "qwen3moe":
            weights.vector(blk + "ffn_gate_inp.weight", weights.rng.standard_normal((N_EXPERTS, n_embd)))
            weights.experts(blk + "ffn_gate_exps", n_ff, n_embd)
            weights.experts(blk + "ffn_up_exps", n_ff, n_embd)
            weights.experts(blk + "ffn_down_exps", n_embd, n_ff, gain=2.0)
            continue
        weights.matrix(blk + "ffn_gate", n_ff, n_embd)
        weights.matrix(blk + "ffn_up", n_ff, n_embd)
        weights.matrix(blk + "ffn_down", n_embd, n_ff, gain=2.0)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def add_vocabulary(writer: GGUFWriter, target: TinyTarget) -> None:
    """A byte-level BPE vocabulary with ChatML's special tokens."""
    tokens, merges, types = vocabulary(target.n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(types)
    writer.add_eos_token_id(target.eos_id)
    writer.add_pad_token_id(target.token_id("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


@dataclass
class RandomWeights:
    """Draws tensors and hands them to the writer: matrices in the file's type, the rest in float32."""

    writer: GGUFWriter
    rng: np.random.Generator
    qtype: GGMLQuantizationType

    def matrix(self, name: str, n_rows: int, n_cols: int, gain: float = 1.0, row_gain: Array | None = None) -> None:
        """``name.weight`` [n_rows, n_cols]; gain 1 keeps the size of a normalized input's entries."""
        values = gain / math.sqrt(n_cols) * self.rng.standard_normal((n_rows, n_cols), dtype=np.float32)
        if row_gain is not None:
            values *= row_gain
        data = gguf.quants.quantize(values, self.qtype)
        self.writer.add_tensor(name + ".weight", data, raw_dtype=self.qtype)

    def experts(self, name: str, n_rows: int, n_cols: int, gain: float = 1.0) -> None:
        """``name.weight`` [N_EXPERTS, n_rows, n_cols]."""
        shape = (N_EXPERTS, n_rows, n_cols)
        values = gain / math.sqrt(n_cols) * self.rng.standard_normal(shape, dtype=np.float32)
        self.writer.add_tensor(name + ".weight", gguf.quants.quantize(values, self.qtype), raw_dtype=self.qtype)

    def vector(self, name: str, values: Array) -> None:
        self.writer.add_tensor(name, values.astype(np.float32))

    def norm(self, name: str, n: int, gain: float = 1.0) -> None:
        self.vector(name, gain * (1.0 + 0.2 * self.rng.standard_normal(n)))


@dataclass(frozen=True)
class DeltaNet:
    """The linear-attention layers of qwen35: metadata and tensors."""

    n_value_heads: int
    n_key_heads: int
    state_size: int
    conv_kernel: int = 4

    def add_keys(self, writer: GGUFWriter, head_dim: int) -> None:
        writer.add_ssm_conv_kernel(self.conv_kernel)
        writer.add_ssm_inner_size(self.state_size * self.n_value_heads)
        writer.add_ssm_state_size(self.state_size)
        writer.add_ssm_time_step_rank(self.n_value_heads)
        writer.add_ssm_group_count(self.n_key_heads)
        writer.add_full_attention_interval(4)
        # Text positions rotate like plain rope whatever the split; the four parts sum to half a head.
        writer.add_rope_dimension_sections([head_dim // 2, 0, 0, 0])

    def add_tensors(self, weights: RandomWeights, blk: str, n_embd: int) -> None:
        value_size = self.state_size * self.n_value_heads
        qkv_size = 2 * self.state_size * self.n_key_heads + value_size
        rng = weights.rng
        weights.matrix(blk + "attn_qkv", qkv_size, n_embd, gain=2.0)
        weights.matrix(blk + "attn_gate", value_size, n_embd)
        weights.vector(blk + "ssm_conv1d.weight", rng.standard_normal((qkv_size, self.conv_kernel)))
        weights.vector(blk + "ssm_dt.bias", rng.standard_normal(self.n_value_heads) - 2.0)
        weights.vector(blk + "ssm_a", -rng.uniform(0.1, 1.0, self.n_value_heads))
        weights.matrix(blk + "ssm_beta", self.n_value_heads, n_embd)
        weights.matrix(blk + "ssm_alpha", self.n_value_heads, n_embd)
        weights.norm(blk + "ssm_norm.weight", self.state_size)
        weights.matrix(blk + "ssm_out", n_embd, value_size, gain=2.0)
