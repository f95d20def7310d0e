// A tensor of a GGUF file, mapped read-only: rows of a matrix that llama.cpp keeps in memory only in a repacked layout.
#pragma once

#include <memory>
#include <string>

#include "base/backend.h"

namespace dspine {

class MappedTensor {
  public:
    // Looks into every part of a split model. Throws ModelFormatError when no part has the tensor.
    MappedTensor(const std::string & model_path, const std::string & name);
    ~MappedTensor();
    MappedTensor(const MappedTensor &) = delete;
    MappedTensor & operator=(const MappedTensor &) = delete;

    const ggml_tensor * tensor() const { return tensor_; }

  private:
    void * address_ = nullptr;
    size_t n_bytes_ = 0;
    ggml_backend_buffer_ptr buffer_;
    ggml_context_ptr ctx_;
    ggml_tensor * tensor_ = nullptr;
};

}  // namespace dspine
