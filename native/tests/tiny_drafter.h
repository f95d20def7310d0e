// Drafter GGUFs that tests write themselves, in memory first, so that a test can change anything before writing.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "ggml-cpp.h"
#include "target/target_tensors.h"

namespace dspine::test {

// A file that is removed at the end.
class TempFile {
  public:
    explicit TempFile(const std::string & name);
    ~TempFile();
    TempFile(const TempFile &) = delete;
    TempFile & operator=(const TempFile &) = delete;

    const std::string & path() const { return path_; }
    void write(const std::vector<char> & bytes) const;
    std::vector<char> read() const;

  private:
    std::string path_;
};

// Keys and tensors that become a GGUF file.
class Gguf {
  public:
    Gguf();

    gguf_context * keys() { return keys_.get(); }
    ggml_tensor * find(const std::string & name);
    // Random values of about the size `scale`, the same in every run.
    void add(const std::string & name, ggml_type type, int64_t ne0, int64_t ne1 = 1, float scale = 0.5f);
    void remove(const std::string & name);
    void rename(const std::string & name, const std::string & to);
    // Other type or shape, new values.
    void replace(const std::string & name, ggml_type type, int64_t ne0, int64_t ne1 = 1);
    const std::vector<ggml_tensor *> & tensors() const { return tensors_; }

    void write(const std::string & path) const;

  private:
    gguf_context_ptr keys_;
    ggml_context_ptr ctx_;
    std::vector<ggml_tensor *> tensors_;
};

// Dimensions of the drafter that tiny_drafter() makes.
struct Tiny {
    static constexpr int N_LAYER = 2, N_EMBD = 32, N_FF = 64, N_VOCAB = 48, BLOCK = 6;
    static constexpr int N_HEAD = 2, N_HEAD_KV = 1, HEAD_DIM = 32, RANK = 32, MESSAGE = 32, TOP_K = 4;
    static constexpr int TARGET_N_LAYER = 4, N_TAPS = 2, MASK = 47, WINDOW = 5;
};

// A valid drafter: matrices of `type`, the second layer sliding.
Gguf tiny_drafter(ggml_type type = GGML_TYPE_Q8_0);

// Embedding and output matrix that fit it.
std::shared_ptr<const TargetTensors> tiny_target();

std::vector<float> random_floats(size_t n, uint32_t seed, float scale = 1.0f);

}  // namespace dspine::test
