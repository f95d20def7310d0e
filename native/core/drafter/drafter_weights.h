// A drafter's weights in the memory of one device. Matrices that are always used together are stacked at load.
#pragma once

#include <vector>

#include "base/backend.h"
#include "drafter/drafter_config.h"
#include "gguf/gguf_file.h"

namespace dspine {

struct DrafterLayer {
    ggml_tensor * attn_norm;    // [D] F32
    ggml_tensor * attn_qkv;     // [D, n_embd_q + 2 * n_embd_kv]
    ggml_tensor * attn_output;  // [n_embd_q, D]
    ggml_tensor * attn_q_norm;  // [head_dim] F32
    ggml_tensor * attn_k_norm;  // [head_dim] F32
    ggml_tensor * ffn_norm;     // [D] F32
    ggml_tensor * ffn_gate_up;  // [D, 2 * F]
    ggml_tensor * ffn_down;     // [F, D]
    ggml_tensor * readout;      // R_l [D, r], with injection
    ggml_tensor * write;        // W_l [m, D], with injection
};

struct DrafterWeights {
    ggml_backend_buffer_ptr buffer;
    ggml_context_ptr ctx;
    ggml_tensor * fc = nullptr;             // [T * D, D]
    ggml_tensor * hidden_norm = nullptr;    // [D] F32
    ggml_tensor * output_norm = nullptr;    // [D] F32
    ggml_tensor * message_gate = nullptr;   // rows of M, then of Gp: [r, 2 * m]
    ggml_tensor * gate_receiver = nullptr;  // Gr [r, m]
    ggml_tensor * inject_bias = nullptr;    // b [m] F32
    ggml_tensor * codes = nullptr;          // [r, V]
    std::vector<DrafterLayer> layers;
    size_t n_bytes = 0;  // on the device
};

// Throws ModelFormatError for missing, extra, wrong-shaped or wrong-typed tensors, BackendError when they do not fit.
DrafterWeights load_weights(const GgufFile & file, const DrafterConfig & config, const Backend & backend);

}  // namespace dspine
