"""GGUF key and tensor names of a dspine-local drafter: the only Python file that knows them.

The C++ reader has the same names in ``native/core/gguf/schema.h``; a test compares the two.
Names follow gguf-py's ``dflash`` architecture wherever both have the same part.
"""

from __future__ import annotations

ARCHITECTURE = "dspine"


class Key:
    """Metadata keys. Every ``dspine.*`` key is listed, with its GGUF type."""

    ARCHITECTURE = "general.architecture"  # string
    NAME = "general.name"  # string
    FILE_TYPE = "general.file_type"  # uint32, llama.cpp's llama_ftype
    QUANTIZATION_VERSION = "general.quantization_version"  # uint32

    BLOCK_COUNT = "dspine.block_count"  # uint32, drafter layers
    EMBEDDING_LENGTH = "dspine.embedding_length"  # uint32, drafter width = target width
    FEED_FORWARD_LENGTH = "dspine.feed_forward_length"  # uint32
    CONTEXT_LENGTH = "dspine.context_length"  # uint32, positions the drafter was made for
    VOCAB_SIZE = "dspine.vocab_size"  # uint32, the target's
    BLOCK_SIZE = "dspine.block_size"  # uint32, anchor + proposals
    TARGET_LAYERS = "dspine.target_layers"  # int32 array, llama.cpp layer inputs: HF layer id + 1
    INJECTION = "dspine.injection"  # bool, false for DFlash drafters
    TRANSFER_RANK = "dspine.transfer_rank"  # uint32, only with injection
    MESSAGE_SIZE = "dspine.message_size"  # uint32, only with injection
    TOP_K = "dspine.top_k"  # uint32, candidates per slot, only with injection

    HEAD_COUNT = "dspine.attention.head_count"  # uint32
    HEAD_COUNT_KV = "dspine.attention.head_count_kv"  # uint32
    KEY_LENGTH = "dspine.attention.key_length"  # uint32, head_dim
    VALUE_LENGTH = "dspine.attention.value_length"  # uint32, head_dim
    RMS_EPS = "dspine.attention.layer_norm_rms_epsilon"  # float32
    CAUSAL = "dspine.attention.causal"  # bool, inside the block
    SLIDING_WINDOW = "dspine.attention.sliding_window"  # uint32, only when some layer slides
    SLIDING_WINDOW_PATTERN = "dspine.attention.sliding_window_pattern"  # bool array [block_count], likewise

    ROPE_DIMENSION_COUNT = "dspine.rope.dimension_count"  # uint32
    ROPE_FREQ_BASE = "dspine.rope.freq_base"  # float32
    ROPE_SCALING_TYPE = "dspine.rope.scaling.type"  # string: none, linear or yarn
    ROPE_SCALING_FACTOR = "dspine.rope.scaling.factor"  # float32, linear and yarn
    ROPE_SCALING_ORIG_CTX = "dspine.rope.scaling.original_context_length"  # uint32, yarn
    ROPE_SCALING_ATTN_FACTOR = "dspine.rope.scaling.attn_factor"  # float32, yarn, optional: total cos/sin scale
    ROPE_SCALING_BETA_FAST = "dspine.rope.scaling.yarn_beta_fast"  # float32, yarn, optional (32)
    ROPE_SCALING_BETA_SLOW = "dspine.rope.scaling.yarn_beta_slow"  # float32, yarn, optional (1)

    TARGET_ARCHITECTURE = "dspine.target.architecture"  # string, when a target was given
    TARGET_BLOCK_COUNT = "dspine.target.block_count"  # uint32
    TARGET_EMBEDDING_LENGTH = "dspine.target.embedding_length"  # uint32
    TARGET_VOCAB_SHA256 = "dspine.target.vocab_sha256"  # string of 64 hex digits, when a target was given
    MASK_TOKEN_ID = "tokenizer.ggml.mask_token_id"  # noqa: S105 - uint32


class Tensor:
    """Tensor names; shapes are [rows, columns] as in the checkpoint (GGUF stores ne reversed)."""

    FC = "fc.weight"  # [D, T*D]
    HIDDEN_NORM = "enc.output_norm.weight"  # [D]
    OUTPUT_NORM = "output_norm.weight"  # [D]
    INJECT_MESSAGE = "inject.message.weight"  # [m, r]
    INJECT_GATE_RECEIVER = "inject.gate_receiver.weight"  # [m, r]
    INJECT_GATE_PREDECESSOR = "inject.gate_predecessor.weight"  # [m, r]
    INJECT_BIAS = "inject.bias"  # [m]
    INJECT_CODES = "inject.codes"  # [V, r]

    ATTN_NORM = "blk.{il}.attn_norm.weight"  # [D]
    ATTN_Q = "blk.{il}.attn_q.weight"  # [n_head * head_dim, D]
    ATTN_K = "blk.{il}.attn_k.weight"  # [n_head_kv * head_dim, D]
    ATTN_V = "blk.{il}.attn_v.weight"  # [n_head_kv * head_dim, D]
    ATTN_OUTPUT = "blk.{il}.attn_output.weight"  # [D, n_head * head_dim]
    ATTN_Q_NORM = "blk.{il}.attn_q_norm.weight"  # [head_dim]
    ATTN_K_NORM = "blk.{il}.attn_k_norm.weight"  # [head_dim]
    FFN_NORM = "blk.{il}.ffn_norm.weight"  # [D]
    FFN_GATE = "blk.{il}.ffn_gate.weight"  # [F, D]
    FFN_UP = "blk.{il}.ffn_up.weight"  # [F, D]
    FFN_DOWN = "blk.{il}.ffn_down.weight"  # [D, F]
    INJECT_READOUT = "blk.{il}.inject_readout.weight"  # [r, D]
    INJECT_WRITE = "blk.{il}.inject_write.weight"  # [D, m]
