// What a drafter GGUF says about itself, read once and checked against itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gguf/gguf_file.h"

namespace dspine {

struct RopeConfig {
    int32_t n_dims;
    float freq_base;
    float freq_scale = 1.0f;   // 1 / scaling factor
    float ext_factor = 0.0f;   // 1 for yarn
    float attn_factor = 1.0f;  // as ggml_rope_ext wants it
    float beta_fast = 32.0f;
    float beta_slow = 1.0f;
    int32_t n_ctx_orig = 0;
};

struct DrafterConfig {
    int32_t n_layer;
    int64_t n_embd;  // D
    int64_t n_ff;
    int64_t n_vocab;  // V
    int32_t n_ctx_train;
    int32_t n_head;
    int32_t n_head_kv;
    int64_t head_dim;
    float rms_eps;
    RopeConfig rope;
    bool causal;                // inside the block
    int32_t window = 0;         // 0: no layer slides
    std::vector<bool> sliding;  // [n_layer]
    int32_t block_size;         // B: anchor + proposals
    int32_t mask_token;
    std::vector<int32_t> target_layers;  // T layer inputs of the target, llama.cpp's numbering
    bool injection;                      // false: a DFlash drafter
    int64_t rank = 0;                    // r
    int64_t message = 0;                 // m
    int32_t top_k = 1;                   // K
    int32_t target_n_layer;
    int64_t target_n_embd;
    std::string target_arch;          // empty: not recorded
    std::string target_vocab_sha256;  // empty: not recorded

    int32_t max_draft() const { return block_size - 1; }
    int64_t n_taps() const { return static_cast<int64_t>(target_layers.size()); }
    int64_t n_embd_q() const { return n_head * head_dim; }
    int64_t n_embd_kv() const { return n_head_kv * head_dim; }
    bool all_sliding() const;

    // Throws ModelFormatError for anything that is missing, of the wrong type, out of range or contradictory.
    static DrafterConfig read(const GgufFile & file);
};

}  // namespace dspine
