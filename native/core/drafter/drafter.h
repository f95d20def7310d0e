// The drafter: weights, cache and graphs on one device, for several sequences at once.
// Called by the engine (through draft_source.h) and by the parity tool.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "drafter/draft_source.h"
#include "drafter/drafter_graph.h"

namespace dspine {

struct DrafterOptions {
    int32_t n_seq = 1;
    int32_t n_ctx = 4096;  // positions per sequence
    int n_threads = 0;     // 0: all cores
    std::string cache_type = "f16";
    std::string order = "auto";  // path, full, or auto: path on a CPU, full elsewhere
    std::string device;          // by name; empty: where the target's output matrix lies, unless that is remote
};

// Everything that a golden case compares, slots first: [n_slots, ...] of one block.
struct BlockTrace {
    Draft draft;
    std::vector<std::vector<float>> pre_injection, post_injection, layer_features;  // per layer
    std::vector<float> final_hidden, logits, scores;
    std::vector<int32_t> candidates;
};

// Nodes of the drafter's graphs with one operation on one type of operand, and whether a device can run them.
struct OperationUse {
    std::string name;
    std::string type;  // of the operand that matters: weights, a cache; empty without one
    int32_t n_nodes;
    bool supported;
};

class Drafter final : public DraftSource {
  public:
    // Throws FileNotFound, ModelFormatError, PairingError (shapes against the target), BackendError.
    Drafter(const std::string & path, std::shared_ptr<const TargetTensors> target, const DrafterOptions & options);

    const DrafterConfig & config() const { return config_; }
    TransitionOrder order() const { return order_; }
    std::string device() const { return backend_.name(); }
    size_t weight_bytes() const { return weights_.n_bytes; }
    size_t cache_bytes() const { return cache_->n_bytes(); }
    size_t compute_bytes() const {
        return backend_.planned ? planned_compute_ : ggml_gallocr_get_buffer_size(allocator_.get(), 0);
    }
    // Operations of its largest graphs as they would be on a device, by name; sorted. Throws std::invalid_argument.
    std::vector<OperationUse> operations(const std::string & device) const;
    // What it has, or, beside a planned target, would have allocated.
    std::vector<MemoryUse> memory() const;

    int32_t max_draft() const override { return config_.max_draft(); }
    int32_t n_seq() const override { return cache_->n_seq(); }
    int32_t n_ctx() const override { return cache_->n_ctx(); }
    const std::vector<int32_t> & taps() const override { return config_.target_layers; }
    int32_t length(int32_t seq) const override;
    int32_t reusable(int32_t seq, int32_t n) const override;
    int32_t lookback() const override { return cache_->lookback(); }
    void truncate(int32_t seq, int32_t n) override;
    std::string save(int32_t seq) const override;  // cache_state.cpp
    void load(int32_t seq, const std::string & state) override;

    // Appends features to the sequences' caches. All rows are checked first, so that a wrong one changes nothing.
    void commit(const std::vector<FeatureRows> & rows) override;
    // n_draft proposals behind every block's committed context. 1 <= n_draft <= max_draft().
    std::vector<Draft> draft(const std::vector<BlockRequest> & blocks, int32_t n_draft) override;
    BlockTrace trace(const BlockRequest & block, int32_t n_draft);  // drafter_trace.cpp

  private:
    void check_pairing(const std::string & path) const;
    void check_seq(int32_t seq) const;
    void need_weights() const;
    void check_operations(ggml_cgraph * graph) const;
    void commit_chunk(const FeatureRows & rows, int32_t first, int32_t n);
    DraftShape largest_shape() const;
    DraftShape shape_for(const std::vector<BlockRequest> & blocks, int32_t n_draft, bool trace) const;
    DraftGraph & prepare(const std::vector<BlockRequest> & blocks, const DraftShape & shape);
    void compute(ggml_cgraph * graph, const char * what);
    void allocate_graph(ggml_cgraph * graph);
    std::vector<Draft> read_drafts(const DraftGraph & graph) const;
    DrafterParts parts() const;

    std::shared_ptr<const TargetTensors> target_;
    DrafterConfig config_;
    Backend backend_;
    DrafterWeights weights_;
    std::unique_ptr<DrafterCache> cache_;
    TransitionOrder order_;
    ggml_backend_buffer_ptr mask_buffer_;
    ggml_context_ptr mask_ctx_;
    ggml_tensor * mask_embd_ = nullptr;  // F32 [D], the mask token's embedding
    ggml_gallocr_ptr allocator_;
    size_t planned_compute_ = 0;
    std::vector<std::pair<int64_t, CommitGraph>> commit_graphs_;  // by number of rows, most recent last
    std::vector<DraftGraph> draft_graphs_;                        // most recent last
};

}  // namespace dspine
