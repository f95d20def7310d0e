#include <functional>

#include "base/errors.h"
#include "check.h"
#include "drafter/drafter_config.h"
#include "gguf/schema.h"
#include "tiny_drafter.h"

using namespace dspine;
using test::Gguf;
using test::TempFile;
using test::Tiny;
using Change = std::function<void(gguf_context *)>;

namespace {

DrafterConfig read_changed(const Change & change) {
    Gguf g = test::tiny_drafter();
    change(g.keys());
    const TempFile file("config.gguf");
    g.write(file.path());
    return DrafterConfig::read(GgufFile(file.path()));
}

void refused(const std::string & message, const Change & change) {
    CHECK_THROWS(ModelFormatError, message, read_changed(change));
}

Change set_u32(const char * key, uint32_t value) {
    return [=](gguf_context * k) { gguf_set_val_u32(k, key, value); };
}

Change set_f32(const char * key, float value) {
    return [=](gguf_context * k) { gguf_set_val_f32(k, key, value); };
}

Change set_taps(std::vector<int32_t> taps) {
    return [=](gguf_context * k) {
        gguf_set_arr_data(k, schema::KEY_TARGET_LAYERS, GGUF_TYPE_INT32, taps.data(), taps.size());
    };
}

Change yarn(float factor, float attn_factor) {
    return [=](gguf_context * k) {
        gguf_set_val_str(k, schema::KEY_ROPE_SCALING_TYPE, "yarn");
        gguf_set_val_f32(k, schema::KEY_ROPE_SCALING_FACTOR, factor);
        gguf_set_val_u32(k, schema::KEY_ROPE_SCALING_ORIG_CTX, 4096);
        gguf_set_val_f32(k, schema::KEY_ROPE_SCALING_ATTN_FACTOR, attn_factor);
    };
}

constexpr const char * REQUIRED[] = {schema::KEY_ARCHITECTURE,
                                     schema::KEY_BLOCK_COUNT,
                                     schema::KEY_EMBEDDING_LENGTH,
                                     schema::KEY_FEED_FORWARD_LENGTH,
                                     schema::KEY_CONTEXT_LENGTH,
                                     schema::KEY_VOCAB_SIZE,
                                     schema::KEY_BLOCK_SIZE,
                                     schema::KEY_HEAD_COUNT,
                                     schema::KEY_HEAD_COUNT_KV,
                                     schema::KEY_KEY_LENGTH,
                                     schema::KEY_VALUE_LENGTH,
                                     schema::KEY_RMS_EPS,
                                     schema::KEY_CAUSAL,
                                     schema::KEY_ROPE_DIMENSION_COUNT,
                                     schema::KEY_ROPE_FREQ_BASE,
                                     schema::KEY_SLIDING_WINDOW_PATTERN,
                                     schema::KEY_TARGET_BLOCK_COUNT,
                                     schema::KEY_TARGET_EMBEDDING_LENGTH,
                                     schema::KEY_TARGET_LAYERS,
                                     schema::KEY_MASK_TOKEN_ID,
                                     schema::KEY_INJECTION,
                                     schema::KEY_TRANSFER_RANK,
                                     schema::KEY_MESSAGE_SIZE,
                                     schema::KEY_TOP_K};

}  // namespace

TEST(a_valid_file_is_read) {
    const DrafterConfig c = read_changed([](gguf_context *) {});
    CHECK_EQ(c.n_layer, Tiny::N_LAYER);
    CHECK_EQ(c.n_embd, Tiny::N_EMBD);
    CHECK_EQ(c.n_embd_q(), Tiny::N_HEAD * Tiny::HEAD_DIM);
    CHECK_EQ(c.n_embd_kv(), Tiny::N_HEAD_KV * Tiny::HEAD_DIM);
    CHECK_EQ(c.window, Tiny::WINDOW);
    CHECK(c.sliding == (std::vector<bool>{false, true}) && !c.all_sliding());
    CHECK_EQ(c.max_draft(), Tiny::BLOCK - 1);
    CHECK(c.target_layers == (std::vector<int32_t>{1, 3}));
    CHECK_EQ(c.top_k, Tiny::TOP_K);
    CHECK(c.causal && c.injection);
    CHECK_EQ(c.rope.freq_scale, 1.0f);
    CHECK_EQ(c.target_arch, "");
}

TEST(every_missing_key_is_named) {
    for (const char * key : REQUIRED) {
        refused("has no key '" + std::string(key) + "'", [&](gguf_context * k) { gguf_remove_key(k, key); });
    }
}

TEST(every_key_of_another_type_is_named) {
    for (const char * key : REQUIRED) {
        refused("has key '" + std::string(key) + "' of type i64",
                [&](gguf_context * k) { gguf_set_val_i64(k, key, 1); });
    }
}

TEST(numbers_outside_their_limits_are_refused) {
    const struct {
        const char * key;
        uint32_t low, high;
    } limits[] = {
        {schema::KEY_BLOCK_COUNT, 1, 128},
        {schema::KEY_EMBEDDING_LENGTH, 1, 1u << 18},
        {schema::KEY_FEED_FORWARD_LENGTH, 1, 1u << 18},
        {schema::KEY_CONTEXT_LENGTH, 1, 1u << 30},
        {schema::KEY_VOCAB_SIZE, 2, 1u << 24},
        {schema::KEY_BLOCK_SIZE, 2, 64},
        {schema::KEY_HEAD_COUNT, 1, 4096},
        {schema::KEY_HEAD_COUNT_KV, 1, 4096},
        {schema::KEY_KEY_LENGTH, 2, 4096},
        {schema::KEY_ROPE_DIMENSION_COUNT, 2, 1u << 18},
        {schema::KEY_SLIDING_WINDOW, 1, 1u << 24},
        {schema::KEY_TARGET_BLOCK_COUNT, 1, 4096},
        {schema::KEY_TARGET_EMBEDDING_LENGTH, 1, 1u << 18},
        {schema::KEY_MASK_TOKEN_ID, 0, Tiny::N_VOCAB - 1},
        {schema::KEY_TRANSFER_RANK, 1, 1u << 18},
        {schema::KEY_MESSAGE_SIZE, 1, 1u << 18},
        {schema::KEY_TOP_K, 1, Tiny::N_VOCAB},
    };
    for (const auto & limit : limits) {
        for (const uint32_t value : {limit.low - 1, limit.high + 1, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
            const std::string range = " = " + std::to_string(value) + ", expected " + std::to_string(limit.low) +
                                      " to " + std::to_string(limit.high);
            refused(limit.key + range, set_u32(limit.key, value));
        }
    }
}

TEST(numbers_that_are_not_positive_are_refused) {
    for (const char * key : {schema::KEY_RMS_EPS, schema::KEY_ROPE_FREQ_BASE}) {
        for (const float value : {0.0f, -1.0f, INFINITY, -INFINITY, NAN}) {
            refused(std::string(key) + " = ", set_f32(key, value));
        }
    }
}

TEST(contradictions_are_refused) {
    refused("has 3 heads, not a multiple of 2 KV heads", [](gguf_context * k) {
        gguf_set_val_u32(k, schema::KEY_HEAD_COUNT, 3);
        gguf_set_val_u32(k, schema::KEY_HEAD_COUNT_KV, 2);
    });
    refused("value_length = 16, expected key_length = 32", set_u32(schema::KEY_VALUE_LENGTH, 16));
    refused("rope.dimension_count = 34", set_u32(schema::KEY_ROPE_DIMENSION_COUNT, 34));
    refused("rope.dimension_count = 31", set_u32(schema::KEY_ROPE_DIMENSION_COUNT, 31));
    refused("target's width is 64, but its own is 32", set_u32(schema::KEY_TARGET_EMBEDDING_LENGTH, 64));
    refused("pattern of 2 layers, expected 3", set_u32(schema::KEY_BLOCK_COUNT, 3));
    refused("bidirectional block", [](gguf_context * k) { gguf_set_val_bool(k, schema::KEY_CAUSAL, false); });
    refused("has architecture 'llama'",
            [](gguf_context * k) { gguf_set_val_str(k, schema::KEY_ARCHITECTURE, "llama"); });
}

TEST(taps_are_layer_inputs_of_the_target) {
    CHECK_EQ(read_changed(set_taps({0, 1, 2, 3})).n_taps(), 4);
    refused("has 0 target layers", set_taps({}));
    refused("has 65 target layers", set_taps(std::vector<int32_t>(65, 1)));
    refused("target layer 4, expected 0 to 3", set_taps({1, Tiny::TARGET_N_LAYER}));
    refused("target layer -1", set_taps({-1}));
}

TEST(a_pattern_without_sliding_layers_has_no_window) {
    const DrafterConfig c = read_changed([](gguf_context * k) {
        const int8_t pattern[] = {0, 0};
        gguf_set_arr_data(k, schema::KEY_SLIDING_WINDOW_PATTERN, GGUF_TYPE_BOOL, pattern, 2);
    });
    CHECK_EQ(c.window, 0);
    CHECK(!c.all_sliding());
}

TEST(drafters_without_injection_need_none_of_its_keys) {
    const DrafterConfig c = read_changed([](gguf_context * k) {
        gguf_set_val_bool(k, schema::KEY_INJECTION, false);
        gguf_set_val_bool(k, schema::KEY_CAUSAL, false);
        for (const char * key : {schema::KEY_TRANSFER_RANK, schema::KEY_MESSAGE_SIZE, schema::KEY_TOP_K}) {
            gguf_remove_key(k, key);
        }
    });
    CHECK(!c.injection && !c.causal);
    CHECK_EQ(c.top_k, 1);
}

TEST(rope_scaling_is_read_as_ggml_wants_it) {
    const auto linear = read_changed([](gguf_context * k) {
        gguf_set_val_str(k, schema::KEY_ROPE_SCALING_TYPE, "linear");
        gguf_set_val_f32(k, schema::KEY_ROPE_SCALING_FACTOR, 4.0f);
    });
    CHECK_EQ(linear.rope.freq_scale, 0.25f);
    CHECK_EQ(linear.rope.ext_factor, 0.0f);

    const RopeConfig r = read_changed(yarn(4.0f, 1.5f)).rope;
    CHECK_EQ(r.freq_scale, 0.25f);
    CHECK_EQ(r.ext_factor, 1.0f);
    CHECK_EQ(r.n_ctx_orig, 4096);
    CHECK_EQ(r.beta_fast, 32.0f);
    CHECK_NEAR(r.attn_factor * (1.0 + 0.1 * std::log(4.0)), 1.5, 1e-6);

    refused("rope.scaling.type = 'dynamic'",
            [](gguf_context * k) { gguf_set_val_str(k, schema::KEY_ROPE_SCALING_TYPE, "dynamic"); });
    for (const float factor : {0.0f, -2.0f, INFINITY, NAN}) {
        refused(schema::KEY_ROPE_SCALING_FACTOR, yarn(factor, 1.0f));
        refused(schema::KEY_ROPE_SCALING_ATTN_FACTOR, yarn(4.0f, factor));
    }
}
