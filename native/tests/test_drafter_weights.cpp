#include "base/errors.h"
#include "check.h"
#include "drafter/drafter_weights.h"
#include "gguf/schema.h"
#include "tiny_drafter.h"

using namespace dspine;
using test::Gguf;
using test::TempFile;
using test::Tiny;

namespace {

struct Loaded {
    Backend backend;  // outlives the weights
    DrafterWeights weights;
};

Loaded load(const Gguf & g) {
    const TempFile file("weights.gguf");
    g.write(file.path());
    const GgufFile f(file.path());
    Loaded loaded;
    loaded.backend = start_backend(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), 1);
    loaded.weights = load_weights(f, DrafterConfig::read(f), loaded.backend);
    return loaded;
}

std::string bytes(const ggml_tensor * t, size_t offset, size_t n) {
    return {static_cast<const char *>(t->data) + offset, n};
}

}  // namespace

TEST(parts_are_stacked_in_order) {
    Gguf g = test::tiny_drafter();
    const Loaded loaded = load(g);
    const ggml_tensor * qkv = loaded.weights.layers[1].attn_qkv;
    CHECK_EQ(qkv->ne[1], (Tiny::N_HEAD + 2 * Tiny::N_HEAD_KV) * Tiny::HEAD_DIM);
    size_t offset = 0;
    for (const char * part : {schema::TENSOR_ATTN_Q, schema::TENSOR_ATTN_K, schema::TENSOR_ATTN_V}) {
        const ggml_tensor * written = g.find(schema::layer(part, 1));
        CHECK(bytes(qkv, offset, ggml_nbytes(written)) == bytes(written, 0, ggml_nbytes(written)));
        offset += ggml_nbytes(written);
    }
    CHECK_EQ(offset, ggml_nbytes(qkv));
}

TEST(every_missing_tensor_is_named) {
    const Gguf whole = test::tiny_drafter();
    for (const ggml_tensor * t : whole.tensors()) {
        Gguf g = test::tiny_drafter();
        g.remove(t->name);
        CHECK_THROWS(ModelFormatError, "has no tensor '" + std::string(t->name) + "'", load(g));
    }
}

TEST(every_wrong_shape_is_refused) {
    const Gguf whole = test::tiny_drafter();
    for (const ggml_tensor * t : whole.tensors()) {
        for (const auto & [ne0, ne1] :
             {std::pair<int64_t, int64_t>{t->ne[0] + 32, t->ne[1]}, {t->ne[0], t->ne[1] + 1}}) {
            Gguf g = test::tiny_drafter();
            g.replace(t->name, t->type, ne0, ne1);
            CHECK_THROWS(ModelFormatError, "has tensor '" + std::string(t->name) + "' of shape [", load(g));
        }
    }
}

TEST(unused_tensors_are_refused) {
    Gguf g = test::tiny_drafter();
    g.add("blk.2.attn_norm.weight", GGML_TYPE_F32, Tiny::N_EMBD);
    CHECK_THROWS(ModelFormatError, "has tensor 'blk.2.attn_norm.weight', which no part", load(g));
}

TEST(vectors_are_f32) {
    Gguf g = test::tiny_drafter();
    g.replace(schema::TENSOR_OUTPUT_NORM, GGML_TYPE_F16, Tiny::N_EMBD);
    CHECK_THROWS(ModelFormatError, "of type f16, expected f32", load(g));
}

TEST(stacked_matrices_share_a_type) {
    Gguf g = test::tiny_drafter();
    g.replace(schema::layer(schema::TENSOR_ATTN_K, 0), GGML_TYPE_F16, Tiny::N_EMBD, Tiny::N_HEAD_KV * Tiny::HEAD_DIM);
    CHECK_THROWS(ModelFormatError, "of type f16, expected q8_0 like 'blk.0.attn_q.weight'", load(g));
}

TEST(matrices_are_of_types_that_the_converter_writes) {
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                                 GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1}) {
        CHECK_EQ(load(test::tiny_drafter(type)).weights.fc->type, type);
    }
    CHECK_THROWS(ModelFormatError, "of type iq4_nl, which drafters do not use",
                 load(test::tiny_drafter(GGML_TYPE_IQ4_NL)));
}
