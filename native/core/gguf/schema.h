// GGUF key and tensor names of a drafter: the only C++ file that knows them.
// convert/schema.py has the same names; a test compares the two. See docs/gguf-schema.md.
#pragma once

#include <string>

namespace dspine::schema {

inline constexpr char ARCHITECTURE[] = "dspine";

inline constexpr char KEY_ARCHITECTURE[] = "general.architecture";
inline constexpr char KEY_BLOCK_COUNT[] = "dspine.block_count";
inline constexpr char KEY_EMBEDDING_LENGTH[] = "dspine.embedding_length";
inline constexpr char KEY_FEED_FORWARD_LENGTH[] = "dspine.feed_forward_length";
inline constexpr char KEY_CONTEXT_LENGTH[] = "dspine.context_length";
inline constexpr char KEY_VOCAB_SIZE[] = "dspine.vocab_size";
inline constexpr char KEY_BLOCK_SIZE[] = "dspine.block_size";
inline constexpr char KEY_TARGET_LAYERS[] = "dspine.target_layers";
inline constexpr char KEY_INJECTION[] = "dspine.injection";
inline constexpr char KEY_TRANSFER_RANK[] = "dspine.transfer_rank";
inline constexpr char KEY_MESSAGE_SIZE[] = "dspine.message_size";
inline constexpr char KEY_TOP_K[] = "dspine.top_k";
inline constexpr char KEY_HEAD_COUNT[] = "dspine.attention.head_count";
inline constexpr char KEY_HEAD_COUNT_KV[] = "dspine.attention.head_count_kv";
inline constexpr char KEY_KEY_LENGTH[] = "dspine.attention.key_length";
inline constexpr char KEY_VALUE_LENGTH[] = "dspine.attention.value_length";
inline constexpr char KEY_RMS_EPS[] = "dspine.attention.layer_norm_rms_epsilon";
inline constexpr char KEY_CAUSAL[] = "dspine.attention.causal";
inline constexpr char KEY_SLIDING_WINDOW[] = "dspine.attention.sliding_window";
inline constexpr char KEY_SLIDING_WINDOW_PATTERN[] = "dspine.attention.sliding_window_pattern";
inline constexpr char KEY_ROPE_DIMENSION_COUNT[] = "dspine.rope.dimension_count";
inline constexpr char KEY_ROPE_FREQ_BASE[] = "dspine.rope.freq_base";
inline constexpr char KEY_ROPE_SCALING_TYPE[] = "dspine.rope.scaling.type";
inline constexpr char KEY_ROPE_SCALING_FACTOR[] = "dspine.rope.scaling.factor";
inline constexpr char KEY_ROPE_SCALING_ORIG_CTX[] = "dspine.rope.scaling.original_context_length";
inline constexpr char KEY_ROPE_SCALING_ATTN_FACTOR[] = "dspine.rope.scaling.attn_factor";
inline constexpr char KEY_ROPE_SCALING_BETA_FAST[] = "dspine.rope.scaling.yarn_beta_fast";
inline constexpr char KEY_ROPE_SCALING_BETA_SLOW[] = "dspine.rope.scaling.yarn_beta_slow";
inline constexpr char KEY_TARGET_ARCHITECTURE[] = "dspine.target.architecture";
inline constexpr char KEY_TARGET_BLOCK_COUNT[] = "dspine.target.block_count";
inline constexpr char KEY_TARGET_EMBEDDING_LENGTH[] = "dspine.target.embedding_length";
inline constexpr char KEY_TARGET_VOCAB_SHA256[] = "dspine.target.vocab_sha256";
inline constexpr char KEY_MASK_TOKEN_ID[] = "tokenizer.ggml.mask_token_id";

inline constexpr char TENSOR_FC[] = "fc.weight";
inline constexpr char TENSOR_HIDDEN_NORM[] = "enc.output_norm.weight";
inline constexpr char TENSOR_OUTPUT_NORM[] = "output_norm.weight";
inline constexpr char TENSOR_INJECT_MESSAGE[] = "inject.message.weight";
inline constexpr char TENSOR_INJECT_GATE_RECEIVER[] = "inject.gate_receiver.weight";
inline constexpr char TENSOR_INJECT_GATE_PREDECESSOR[] = "inject.gate_predecessor.weight";
inline constexpr char TENSOR_INJECT_BIAS[] = "inject.bias";
inline constexpr char TENSOR_INJECT_CODES[] = "inject.codes";

inline constexpr char TENSOR_ATTN_NORM[] = "blk.{il}.attn_norm.weight";
inline constexpr char TENSOR_ATTN_Q[] = "blk.{il}.attn_q.weight";
inline constexpr char TENSOR_ATTN_K[] = "blk.{il}.attn_k.weight";
inline constexpr char TENSOR_ATTN_V[] = "blk.{il}.attn_v.weight";
inline constexpr char TENSOR_ATTN_OUTPUT[] = "blk.{il}.attn_output.weight";
inline constexpr char TENSOR_ATTN_Q_NORM[] = "blk.{il}.attn_q_norm.weight";
inline constexpr char TENSOR_ATTN_K_NORM[] = "blk.{il}.attn_k_norm.weight";
inline constexpr char TENSOR_FFN_NORM[] = "blk.{il}.ffn_norm.weight";
inline constexpr char TENSOR_FFN_GATE[] = "blk.{il}.ffn_gate.weight";
inline constexpr char TENSOR_FFN_UP[] = "blk.{il}.ffn_up.weight";
inline constexpr char TENSOR_FFN_DOWN[] = "blk.{il}.ffn_down.weight";
inline constexpr char TENSOR_INJECT_READOUT[] = "blk.{il}.inject_readout.weight";
inline constexpr char TENSOR_INJECT_WRITE[] = "blk.{il}.inject_write.weight";

inline std::string layer(const char * pattern, int il) {
    std::string name = pattern;
    return name.replace(name.find("{il}"), 4, std::to_string(il));
}

}  // namespace dspine::schema
