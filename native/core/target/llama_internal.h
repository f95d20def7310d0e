// Functions that the pinned llama.cpp exports without an installed header (its src/llama-ext.h and src/llama-model.h).
// Included by target.cpp, target_memory.cpp and quant_types.cpp only; the version is pinned in pyproject.toml because
// of this file.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "llama.h"

LLAMA_API void llama_set_embeddings_layer_inp(llama_context * ctx, uint32_t lid, bool value);
LLAMA_API float * llama_get_embeddings_layer_inp(llama_context * ctx, uint32_t lid);

// In bytes, per buffer type.
struct llama_memory_breakdown_data {
    size_t model;
    size_t context;
    size_t compute;
};
LLAMA_API std::map<ggml_backend_buffer_type_t, llama_memory_breakdown_data> llama_get_memory_breakdown(
    const llama_context * ctx);

const std::vector<std::pair<std::string, ggml_tensor *>> & llama_internal_get_tensor_map(const llama_model * model);

struct quantize_state_impl;
struct llama_quant_model_desc {
    const char * architecture;
    uint32_t n_embd;
    uint32_t n_ff;
    uint32_t n_layer;
    uint32_t n_head;
    uint32_t n_head_kv;
    uint32_t n_expert;
    uint32_t n_embd_head_k;
    uint32_t n_embd_head_v;
};
LLAMA_API llama_model * llama_quant_model_from_metadata(const llama_quant_model_desc * desc);
LLAMA_API quantize_state_impl * llama_quant_init(const llama_model * model, const llama_model_quantize_params * params);
LLAMA_API void llama_quant_free(quantize_state_impl * state);
LLAMA_API bool llama_quant_tensor_allows_quantization(const quantize_state_impl * state, const ggml_tensor * tensor);
LLAMA_API void llama_quant_compute_types(quantize_state_impl * state, llama_ftype file_type, ggml_tensor ** tensors,
                                         ggml_type * types, size_t n_tensors);

// Only what is called. After the layer inputs that are kept have changed, the next decode would call it.
struct llama_context {
    void sched_reserve();
};
