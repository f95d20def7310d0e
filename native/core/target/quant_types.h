// Which type llama.cpp's quantizer would give each tensor of a model that exists as a description only.
// Called by the memory planner, through the bindings.
#pragma once

#include <string>
#include <vector>

#include "llama.h"

namespace dspine {

struct ModelShape {
    std::string arch;
    uint32_t n_layer, n_embd, n_ff, n_head, n_head_kv, head_dim;
};

struct TensorShape {
    std::string name;
    std::vector<int64_t> ne;  // as in ggml, row length first
};

// Of every tensor, in order; those that are never quantized are F32. Throws std::invalid_argument for an unknown
// architecture, or a shape that is none.
std::vector<ggml_type> quantized_types(const ModelShape & model, const std::vector<TensorShape> & tensors,
                                       llama_ftype file_type);

}  // namespace dspine
