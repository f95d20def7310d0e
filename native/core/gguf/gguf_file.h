// Typed, checked reading of a GGUF file's header. Every mismatch is a ModelFormatError that names file, key,
// what was found and what was expected; ggml's own getters would abort the process.
// Called by the drafter's loader, the target's checks and the Python `inspect` command.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml-cpp.h"

namespace dspine {

struct GgufTensor {
    std::string name;
    ggml_type type;
    int64_t ne[GGML_MAX_DIMS];
    int n_dims;
    size_t offset;  // bytes from the start of the file
    size_t n_bytes;
};

class GgufFile {
  public:
    explicit GgufFile(const std::string & path);

    const std::string & path() const { return path_; }
    const gguf_context * raw() const { return ctx_.get(); }
    const std::vector<GgufTensor> & tensors() const { return tensors_; }
    const GgufTensor * find_tensor(const std::string & name) const;

    bool has(const std::string & key) const;
    uint32_t u32(const std::string & key) const;
    uint32_t u32(const std::string & key, uint32_t fallback) const;
    float f32(const std::string & key) const;
    float f32(const std::string & key, float fallback) const;
    bool boolean(const std::string & key) const;
    std::string str(const std::string & key) const;
    std::string str(const std::string & key, const std::string & fallback) const;
    std::vector<int32_t> i32_array(const std::string & key) const;
    std::vector<bool> bool_array(const std::string & key) const;
    std::vector<std::string> str_array(const std::string & key) const;
    int64_t array_length(const std::string & key) const;  // of any element type

    // Reads a tensor's bytes; `out` has n_bytes.
    void read(const GgufTensor & tensor, void * out) const;

    [[noreturn]] void fail(const std::string & what) const;

  private:
    int64_t need(const std::string & key, gguf_type type) const;
    int64_t need_array(const std::string & key, gguf_type element) const;

    std::string path_;
    gguf_context_ptr ctx_;
    std::vector<GgufTensor> tensors_;
};

}  // namespace dspine
