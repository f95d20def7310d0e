#include "drafter/drafter_config.h"

#include <algorithm>
#include <cmath>

#include "gguf/schema.h"

namespace dspine {
namespace {

// Limits keep every product of two dimensions far from overflow and a damaged file from asking for terabytes.
constexpr uint32_t MAX_WIDTH = 1u << 18;
constexpr uint32_t MAX_VOCAB = 1u << 24;
constexpr uint32_t MAX_LAYERS = 128;
constexpr uint32_t MAX_BLOCK = 64;
constexpr uint32_t MAX_TOP_K = 256;

uint32_t in_range(const GgufFile & file, const char * key, uint32_t low, uint32_t high) {
    const uint32_t value = file.u32(key);
    if (value < low || value > high) {
        file.fail("has " + std::string(key) + " = " + std::to_string(value) + ", expected " + std::to_string(low) +
                  " to " + std::to_string(high));
    }
    return value;
}

float positive(const GgufFile & file, const char * key, float value) {
    if (!std::isfinite(value) || value <= 0.0f) {
        file.fail("has " + std::string(key) + " = " + std::to_string(value) + ", expected a positive number");
    }
    return value;
}

RopeConfig read_rope(const GgufFile & file, int64_t head_dim) {
    RopeConfig rope = {};
    rope.n_dims = static_cast<int32_t>(in_range(file, schema::KEY_ROPE_DIMENSION_COUNT, 2, MAX_WIDTH));
    if (rope.n_dims > head_dim || rope.n_dims % 2 != 0) {
        file.fail("has rope.dimension_count = " + std::to_string(rope.n_dims) + ", expected an even number up to " +
                  std::to_string(head_dim));
    }
    rope.freq_base = positive(file, schema::KEY_ROPE_FREQ_BASE, file.f32(schema::KEY_ROPE_FREQ_BASE));
    const std::string type = file.str(schema::KEY_ROPE_SCALING_TYPE, "none");
    if (type == "none") {
        return rope;
    }
    if (type != "linear" && type != "yarn") {
        file.fail("has rope.scaling.type = '" + type + "', expected none, linear or yarn");
    }
    const float factor = positive(file, schema::KEY_ROPE_SCALING_FACTOR, file.f32(schema::KEY_ROPE_SCALING_FACTOR));
    rope.freq_scale = 1.0f / factor;
    if (type == "yarn") {
        rope.ext_factor = 1.0f;
        rope.n_ctx_orig = static_cast<int32_t>(in_range(file, schema::KEY_ROPE_SCALING_ORIG_CTX, 1, 1u << 30));
        rope.beta_fast = positive(file, schema::KEY_ROPE_SCALING_BETA_FAST,
                                  file.f32(schema::KEY_ROPE_SCALING_BETA_FAST, rope.beta_fast));
        rope.beta_slow = positive(file, schema::KEY_ROPE_SCALING_BETA_SLOW,
                                  file.f32(schema::KEY_ROPE_SCALING_BETA_SLOW, rope.beta_slow));
        // The file has the total scale of cos and sin; ggml multiplies its own 1 + 0.1 ln(factor) in.
        const float own = 1.0f + 0.1f * std::log(factor);
        const float total =
            positive(file, schema::KEY_ROPE_SCALING_ATTN_FACTOR, file.f32(schema::KEY_ROPE_SCALING_ATTN_FACTOR, own));
        rope.attn_factor = total / own;
    }
    return rope;
}

void read_sliding(const GgufFile & file, DrafterConfig & c) {
    c.sliding.assign(static_cast<size_t>(c.n_layer), false);
    if (!file.has(schema::KEY_SLIDING_WINDOW)) {
        return;
    }
    c.window = static_cast<int32_t>(in_range(file, schema::KEY_SLIDING_WINDOW, 1, 1u << 24));
    c.sliding = file.bool_array(schema::KEY_SLIDING_WINDOW_PATTERN);
    if (c.sliding.size() != static_cast<size_t>(c.n_layer)) {
        file.fail("has a sliding window pattern of " + std::to_string(c.sliding.size()) + " layers, expected " +
                  std::to_string(c.n_layer));
    }
    if (std::none_of(c.sliding.begin(), c.sliding.end(), [](bool s) { return s; })) {
        c.window = 0;
    }
}

void read_target(const GgufFile & file, DrafterConfig & c) {
    c.target_n_layer = static_cast<int32_t>(in_range(file, schema::KEY_TARGET_BLOCK_COUNT, 1, 4096));
    c.target_n_embd = in_range(file, schema::KEY_TARGET_EMBEDDING_LENGTH, 1, MAX_WIDTH);
    c.target_arch = file.str(schema::KEY_TARGET_ARCHITECTURE, "");
    c.target_vocab_sha256 = file.str(schema::KEY_TARGET_VOCAB_SHA256, "");
    if (c.target_n_embd != c.n_embd) {
        file.fail("says that the target's width is " + std::to_string(c.target_n_embd) + ", but its own is " +
                  std::to_string(c.n_embd));
    }
    c.target_layers = file.i32_array(schema::KEY_TARGET_LAYERS);
    if (c.target_layers.empty() || c.target_layers.size() > 64) {
        file.fail("has " + std::to_string(c.target_layers.size()) + " target layers, expected 1 to 64");
    }
    for (const int32_t lid : c.target_layers) {
        if (lid < 0 || lid >= c.target_n_layer) {
            file.fail("taps the input of target layer " + std::to_string(lid) + ", expected 0 to " +
                      std::to_string(c.target_n_layer - 1));
        }
    }
}

}  // namespace

bool DrafterConfig::all_sliding() const {
    return std::all_of(sliding.begin(), sliding.end(), [](bool s) { return s; });
}

DrafterConfig DrafterConfig::read(const GgufFile & file) {
    const std::string arch = file.str(schema::KEY_ARCHITECTURE);
    if (arch != schema::ARCHITECTURE) {
        file.fail("has architecture '" + arch + "', expected a drafter of architecture '" + schema::ARCHITECTURE +
                  "' (made by `dspine-local convert`)");
    }
    DrafterConfig c = {};
    c.n_layer = static_cast<int32_t>(in_range(file, schema::KEY_BLOCK_COUNT, 1, MAX_LAYERS));
    c.n_embd = in_range(file, schema::KEY_EMBEDDING_LENGTH, 1, MAX_WIDTH);
    c.n_ff = in_range(file, schema::KEY_FEED_FORWARD_LENGTH, 1, MAX_WIDTH);
    c.n_ctx_train = static_cast<int32_t>(in_range(file, schema::KEY_CONTEXT_LENGTH, 1, 1u << 30));
    c.n_vocab = in_range(file, schema::KEY_VOCAB_SIZE, 2, MAX_VOCAB);
    c.block_size = static_cast<int32_t>(in_range(file, schema::KEY_BLOCK_SIZE, 2, MAX_BLOCK));
    c.n_head = static_cast<int32_t>(in_range(file, schema::KEY_HEAD_COUNT, 1, 4096));
    c.n_head_kv = static_cast<int32_t>(in_range(file, schema::KEY_HEAD_COUNT_KV, 1, 4096));
    if (c.n_head % c.n_head_kv != 0) {
        file.fail("has " + std::to_string(c.n_head) + " heads, not a multiple of " + std::to_string(c.n_head_kv) +
                  " KV heads");
    }
    c.head_dim = in_range(file, schema::KEY_KEY_LENGTH, 2, 4096);
    if (file.u32(schema::KEY_VALUE_LENGTH) != c.head_dim) {
        file.fail("has attention.value_length = " + std::to_string(file.u32(schema::KEY_VALUE_LENGTH)) +
                  ", expected key_length = " + std::to_string(c.head_dim));
    }
    c.rms_eps = positive(file, schema::KEY_RMS_EPS, file.f32(schema::KEY_RMS_EPS));
    c.causal = file.boolean(schema::KEY_CAUSAL);
    c.rope = read_rope(file, c.head_dim);
    read_sliding(file, c);
    read_target(file, c);
    c.mask_token =
        static_cast<int32_t>(in_range(file, schema::KEY_MASK_TOKEN_ID, 0, static_cast<uint32_t>(c.n_vocab - 1)));
    c.injection = file.boolean(schema::KEY_INJECTION);
    if (c.injection) {
        c.rank = in_range(file, schema::KEY_TRANSFER_RANK, 1, MAX_WIDTH);
        c.message = in_range(file, schema::KEY_MESSAGE_SIZE, 1, MAX_WIDTH);
        c.top_k = static_cast<int32_t>(
            in_range(file, schema::KEY_TOP_K, 1, std::min<uint32_t>(MAX_TOP_K, static_cast<uint32_t>(c.n_vocab))));
        if (!c.causal) {
            file.fail("has injection and a bidirectional block, expected attention.causal = true");
        }
    }
    return c;
}

}  // namespace dspine
