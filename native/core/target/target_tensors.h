// What a drafter borrows from its target: the token embedding, the output matrix and their shape.
// The tensors belong to a llama.cpp model (target.cpp) or to this object (parity runs, tests).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/backend.h"

namespace dspine {

// Rows of a matrix, dequantized on the host wherever the matrix lies.
class RowReader {
  public:
    RowReader() = default;
    explicit RowReader(const ggml_tensor * matrix) : matrix_(matrix) {}

    // out: float32 [ne0]
    void read(int64_t row, float * out) const;
    // The row's bytes when the matrix is readable in place, else nullptr.
    const void * in_place(int64_t row) const;
    ggml_type type() const { return matrix_->type; }

  private:
    const ggml_tensor * matrix_ = nullptr;
};

struct TargetTensors {
    std::string arch;  // empty when there is no target file
    int32_t n_layer = 0;
    int64_t n_embd = 0;
    int64_t n_vocab = 0;
    const ggml_tensor * token_embd = nullptr;   // [D, V]
    ggml_tensor * output = nullptr;             // [D, V], on `device`
    const ggml_tensor * output_rows = nullptr;  // the same values in a layout whose rows can be read, or nullptr
    ggml_backend_dev_t device = nullptr;
    bool planned = false;      // no matrix has data
    size_t n_bytes_owned = 0;  // of `output`, where it is a copy made for a drafter on another device

    std::vector<std::shared_ptr<const void>> owners;  // keep the model alive as long as a drafter borrows from it
    ggml_backend_buffer_ptr owned_buffer;
    ggml_context_ptr owned_ctx;

    // From float32 arrays [V, D], on the CPU.
    static std::shared_ptr<TargetTensors> from_arrays(const float * embed, const float * head, int64_t n_vocab,
                                                      int64_t n_embd);
};

// The same matrices for a drafter on `backend`: themselves where the output matrix lies there, else with a copy of it.
// Throws BackendError when there is no room for it, or its rows cannot be read.
std::shared_ptr<const TargetTensors> on_backend(std::shared_ptr<const TargetTensors> tensors, const Backend & backend);

}  // namespace dspine
