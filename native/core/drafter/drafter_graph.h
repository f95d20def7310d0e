// The two graphs of a drafter (docs/method.md): commit (features -> keys and values) and draft (block -> candidates and
// transition scores). Built here, owned and run by drafter.cpp.
//
// Columns of a draft graph are slot-major: slot j of block s is column j * n_blocks + s. So "slots 1 and up" and
// "the predecessors of slots 2 and up" are plain contiguous views.
#pragma once

#include <memory>
#include <vector>

#include "drafter/drafter_cache.h"
#include "drafter/drafter_config.h"
#include "drafter/drafter_weights.h"
#include "drafter/transitions.h"
#include "target/target_tensors.h"

namespace dspine {

// How the transition scores of docs/method.md are evaluated. Both give the same draft.
enum class TransitionOrder {
    path,  // the chosen predecessor only, slot by slot: 1/K of the work, right on a CPU
    full,  // all K x K transitions at once, no serial step: right on a GPU
};

struct CommitGraph {
    ggml_context_ptr ctx;
    ggml_cgraph * graph = nullptr;
    ggml_tensor * features = nullptr;   // in: F32 [T * D, n]
    ggml_tensor * positions = nullptr;  // in: I32 [n]
    ggml_tensor * rows[N_LAYER_KINDS] = {nullptr,
                                         nullptr};  // in: I64 [n], cache rows; null when no layer is of the kind
};

struct DraftShape {
    std::vector<int32_t> seqs;                 // sequence of every block
    int32_t n_slots = 0;                       // slots that are computed, anchor included
    int32_t n_draft = 0;                       // proposals asked for, <= n_slots - 1
    std::vector<int64_t> n_kv[N_LAYER_KINDS];  // per block, cells that attention reads
    TransitionOrder order = TransitionOrder::path;
    bool trace = false;

    bool operator==(const DraftShape & o) const;
    int64_t n_blocks() const { return static_cast<int64_t>(seqs.size()); }
};

struct DraftTrace {
    std::vector<ggml_tensor *> pre_injection;   // per layer F32 [D, n_slots * n_blocks]
    std::vector<ggml_tensor *> post_injection;  // likewise
    std::vector<ggml_tensor *> layer_features;  // per layer F32 [r, n_slots * n_blocks]
    ggml_tensor * final_hidden = nullptr;       // F32 [D, n_slots * n_blocks]
};

struct DraftGraph {
    DraftShape shape;
    ggml_context_ptr ctx;
    ggml_cgraph * graph = nullptr;
    ggml_tensor * anchor_embd = nullptr;  // in: F32 [D, n_blocks]
    ggml_tensor * anchors = nullptr;      // in: I32 [n_blocks]; null without injection
    ggml_tensor * positions = nullptr;    // in: I32 [n_slots * n_blocks]
    // in: those of slots 1 and up, where the last layer has no anchor. Not a view of all positions: Vulkan would read
    // it from the wrong place, since its offset is not aligned as storage buffers are.
    ggml_tensor * positions_from_1 = nullptr;
    ggml_tensor * rows[N_LAYER_KINDS] = {nullptr, nullptr};  // in: I64 [n_slots * n_blocks]
    std::vector<ggml_tensor *> masks[N_LAYER_KINDS];         // in: per block F16 [n_kv, n_slots]

    ggml_tensor * logits = nullptr;      // F32 [V, n_draft * n_blocks]
    ggml_tensor * candidates = nullptr;  // out: I32 [K, n_draft * n_blocks]; without injection [n_draft * n_blocks]
    ggml_tensor * scores = nullptr;  // out, full order: F32 [K of the slot, K of its predecessor, n_draft * n_blocks]
    ggml_tensor * path = nullptr;    // out, path order: I32 [2, n_draft * n_blocks], token and probability bits
    std::unique_ptr<PathWalk> walk;  // what the path operation reads
    DraftTrace trace;
};

struct DrafterParts {
    const DrafterConfig & config;
    const DrafterWeights & weights;
    const DrafterCache & cache;
    const TargetTensors & target;
    ggml_tensor * mask_embd;  // F32 [D]
    bool is_cpu;
};

CommitGraph build_commit_graph(const DrafterParts & parts, int64_t n_rows);
DraftGraph build_draft_graph(const DrafterParts & parts, const DraftShape & shape);

}  // namespace dspine
