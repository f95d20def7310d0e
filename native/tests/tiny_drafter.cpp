#include "tiny_drafter.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "check.h"
#include "gguf/quantize.h"
#include "gguf/schema.h"

namespace dspine::test {

TempFile::TempFile(const std::string & name)
    : path_((std::filesystem::temp_directory_path() / ("dspine-" + std::to_string(getpid()) + "-" + name)).string()) {}

TempFile::~TempFile() {
    std::remove(path_.c_str());
}

void TempFile::write(const std::vector<char> & bytes) const {
    std::ofstream file(path_, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    CHECK(file.good());
}

std::vector<char> TempFile::read() const {
    std::ifstream file(path_, std::ios::binary);
    CHECK(file.good());
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<float> random_floats(size_t n, uint32_t seed, float scale) {
    std::mt19937 random(seed);
    std::vector<float> out(n);
    for (float & x : out) {  // not a standard distribution: those differ between libraries
        x = scale * (static_cast<float>(random() >> 8) / 8388608.0f - 1.0f);
    }
    return out;
}

Gguf::Gguf() : keys_(gguf_init_empty()), ctx_(ggml_init({size_t{1} << 22, nullptr, /*no_alloc=*/false})) {}

ggml_tensor * Gguf::find(const std::string & name) {
    const auto found =
        std::find_if(tensors_.begin(), tensors_.end(), [&](const ggml_tensor * t) { return name == t->name; });
    CHECK(found != tensors_.end());
    return *found;
}

void Gguf::add(const std::string & name, ggml_type type, int64_t ne0, int64_t ne1, float scale) {
    ggml_tensor * t = ggml_new_tensor_2d(ctx_.get(), type, ne0, ne1);
    ggml_set_name(t, name.c_str());
    const auto seed = static_cast<uint32_t>(tensors_.size());
    const std::vector<float> values = random_floats(static_cast<size_t>(ne0 * ne1), seed, scale);
    quantize_rows(type, values.data(), t->data, ne1, ne0, nullptr, 1);
    tensors_.push_back(t);
}

void Gguf::remove(const std::string & name) {
    tensors_.erase(std::find(tensors_.begin(), tensors_.end(), find(name)));
}

void Gguf::rename(const std::string & name, const std::string & to) {
    ggml_set_name(find(name), to.c_str());
}

void Gguf::replace(const std::string & name, ggml_type type, int64_t ne0, int64_t ne1) {
    remove(name);
    add(name, type, ne0, ne1);
}

void Gguf::write(const std::string & path) const {
    gguf_context_ptr out(gguf_init_empty());
    gguf_set_kv(out.get(), keys_.get());
    for (const ggml_tensor * t : tensors_) {
        gguf_add_tensor(out.get(), t);
    }
    CHECK(gguf_write_to_file(out.get(), path.c_str(), /*only_meta=*/false));
}

Gguf tiny_drafter(ggml_type type) {
    using T = Tiny;
    Gguf g;
    gguf_context * k = g.keys();
    gguf_set_val_str(k, schema::KEY_ARCHITECTURE, schema::ARCHITECTURE);
    gguf_set_val_u32(k, schema::KEY_BLOCK_COUNT, T::N_LAYER);
    gguf_set_val_u32(k, schema::KEY_EMBEDDING_LENGTH, T::N_EMBD);
    gguf_set_val_u32(k, schema::KEY_FEED_FORWARD_LENGTH, T::N_FF);
    gguf_set_val_u32(k, schema::KEY_CONTEXT_LENGTH, 4096);
    gguf_set_val_u32(k, schema::KEY_VOCAB_SIZE, T::N_VOCAB);
    gguf_set_val_u32(k, schema::KEY_BLOCK_SIZE, T::BLOCK);
    gguf_set_val_u32(k, schema::KEY_HEAD_COUNT, T::N_HEAD);
    gguf_set_val_u32(k, schema::KEY_HEAD_COUNT_KV, T::N_HEAD_KV);
    gguf_set_val_u32(k, schema::KEY_KEY_LENGTH, T::HEAD_DIM);
    gguf_set_val_u32(k, schema::KEY_VALUE_LENGTH, T::HEAD_DIM);
    gguf_set_val_f32(k, schema::KEY_RMS_EPS, 1e-6f);
    gguf_set_val_bool(k, schema::KEY_CAUSAL, true);
    gguf_set_val_u32(k, schema::KEY_ROPE_DIMENSION_COUNT, T::HEAD_DIM);
    gguf_set_val_f32(k, schema::KEY_ROPE_FREQ_BASE, 10000.0f);
    gguf_set_val_u32(k, schema::KEY_SLIDING_WINDOW, T::WINDOW);
    const int8_t pattern[T::N_LAYER] = {0, 1};
    gguf_set_arr_data(k, schema::KEY_SLIDING_WINDOW_PATTERN, GGUF_TYPE_BOOL, pattern, T::N_LAYER);
    gguf_set_val_u32(k, schema::KEY_TARGET_BLOCK_COUNT, T::TARGET_N_LAYER);
    gguf_set_val_u32(k, schema::KEY_TARGET_EMBEDDING_LENGTH, T::N_EMBD);
    const int32_t taps[T::N_TAPS] = {1, 3};
    gguf_set_arr_data(k, schema::KEY_TARGET_LAYERS, GGUF_TYPE_INT32, taps, T::N_TAPS);
    gguf_set_val_u32(k, schema::KEY_MASK_TOKEN_ID, T::MASK);
    gguf_set_val_bool(k, schema::KEY_INJECTION, true);
    gguf_set_val_u32(k, schema::KEY_TRANSFER_RANK, T::RANK);
    gguf_set_val_u32(k, schema::KEY_MESSAGE_SIZE, T::MESSAGE);
    gguf_set_val_u32(k, schema::KEY_TOP_K, T::TOP_K);

    g.add(schema::TENSOR_FC, type, T::N_TAPS * T::N_EMBD, T::N_EMBD);
    g.add(schema::TENSOR_HIDDEN_NORM, GGML_TYPE_F32, T::N_EMBD);
    g.add(schema::TENSOR_OUTPUT_NORM, GGML_TYPE_F32, T::N_EMBD);
    g.add(schema::TENSOR_INJECT_MESSAGE, type, T::RANK, T::MESSAGE);
    g.add(schema::TENSOR_INJECT_GATE_RECEIVER, type, T::RANK, T::MESSAGE);
    g.add(schema::TENSOR_INJECT_GATE_PREDECESSOR, type, T::RANK, T::MESSAGE);
    g.add(schema::TENSOR_INJECT_BIAS, GGML_TYPE_F32, T::MESSAGE);
    g.add(schema::TENSOR_INJECT_CODES, type, T::RANK, T::N_VOCAB);
    for (int il = 0; il < T::N_LAYER; ++il) {
        const auto add = [&](const char * pattern, ggml_type t, int64_t ne0, int64_t ne1 = 1) {
            g.add(schema::layer(pattern, il), t, ne0, ne1);
        };
        add(schema::TENSOR_ATTN_NORM, GGML_TYPE_F32, T::N_EMBD);
        add(schema::TENSOR_ATTN_Q, type, T::N_EMBD, T::N_HEAD * T::HEAD_DIM);
        add(schema::TENSOR_ATTN_K, type, T::N_EMBD, T::N_HEAD_KV * T::HEAD_DIM);
        add(schema::TENSOR_ATTN_V, type, T::N_EMBD, T::N_HEAD_KV * T::HEAD_DIM);
        add(schema::TENSOR_ATTN_OUTPUT, type, T::N_HEAD * T::HEAD_DIM, T::N_EMBD);
        add(schema::TENSOR_ATTN_Q_NORM, GGML_TYPE_F32, T::HEAD_DIM);
        add(schema::TENSOR_ATTN_K_NORM, GGML_TYPE_F32, T::HEAD_DIM);
        add(schema::TENSOR_FFN_NORM, GGML_TYPE_F32, T::N_EMBD);
        add(schema::TENSOR_FFN_GATE, type, T::N_EMBD, T::N_FF);
        add(schema::TENSOR_FFN_UP, type, T::N_EMBD, T::N_FF);
        add(schema::TENSOR_FFN_DOWN, type, T::N_FF, T::N_EMBD);
        add(schema::TENSOR_INJECT_READOUT, type, T::N_EMBD, T::RANK);
        add(schema::TENSOR_INJECT_WRITE, type, T::MESSAGE, T::N_EMBD);
    }
    return g;
}

std::shared_ptr<const TargetTensors> tiny_target() {
    const auto embed = random_floats(Tiny::N_VOCAB * Tiny::N_EMBD, 1);
    const auto head = random_floats(Tiny::N_VOCAB * Tiny::N_EMBD, 2);
    auto target = TargetTensors::from_arrays(embed.data(), head.data(), Tiny::N_VOCAB, Tiny::N_EMBD);
    target->n_layer = Tiny::TARGET_N_LAYER;
    return target;
}

}  // namespace dspine::test
