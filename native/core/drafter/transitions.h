// Candidates and transition scores on the CPU (docs/method.md, "Candidates and transitions"), as ggml custom
// operations, and the greedy walk over a full score table for devices. Used by draft_graph.cpp and drafter.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "ggml.h"

namespace dspine {

// The k largest of every column of logits [V, n], best first, the lower index first among equals: I32 [k, n].
// NaN is never chosen while anything else is left.
ggml_tensor * top_candidates(ggml_context * ctx, ggml_tensor * logits, int32_t k);

// Follows the greedy path slot by slot: re-applies the last write with the chosen predecessor, scores the candidates
// with the output matrix, takes the best. All weights must be in host memory. Lives as long as its graph.
struct PathWalk {
    int64_t n_blocks = 0;
    int64_t n_draft = 0;
    int64_t top_k = 0;
    float rms_eps = 0.0f;
    float code_scale = 0.0f;                     // sqrt(r)
    const ggml_tensor * codes = nullptr;         // [r, V]
    const ggml_tensor * message_gate = nullptr;  // M over Gp: [r, 2 * m]
    const ggml_tensor * write = nullptr;         // W_L [m, D]
    const ggml_tensor * output_norm = nullptr;   // F32 [D]
    const ggml_tensor * head = nullptr;          // [D, V], readable rows

    // y: pre-write output of the last layer, F32 [D, n]; gate_f: Gr @ f + b, F32 [m, n]; scale: F32 [1, n];
    // candidates: I32 [k, n]; anchors: I32 [n_blocks]; n = n_draft * n_blocks, slot-major.
    // Returns I32 [2, n]: the token, and the bits of its float32 probability among the candidates.
    ggml_tensor * add_to_graph(ggml_context * ctx, ggml_tensor * y, ggml_tensor * gate_f, ggml_tensor * scale,
                               ggml_tensor * candidates, ggml_tensor * anchors);
};

struct Draft {
    std::vector<int32_t> tokens;
    std::vector<float>
        probabilities;  // of each token among its slot's candidates; empty for drafters without injection
};

// The greedy path through scores [k of the slot, k of its predecessor, n], candidates [k, n]; n = n_draft * n_blocks.
std::vector<Draft> walk_scores(const std::vector<float> & scores, const std::vector<int32_t> & candidates,
                               int64_t n_blocks, int64_t n_draft, int64_t k);

}  // namespace dspine
