// Functions that the pinned llama.cpp exports without an installed header (its src/llama-ext.h and src/llama-model.h).
// Included by target.cpp only; the version is pinned in pyproject.toml because of this file.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "llama.h"

LLAMA_API void llama_set_embeddings_layer_inp(llama_context * ctx, uint32_t lid, bool value);
LLAMA_API float * llama_get_embeddings_layer_inp(llama_context * ctx, uint32_t lid);
const std::vector<std::pair<std::string, ggml_tensor *>> & llama_internal_get_tensor_map(const llama_model * model);
