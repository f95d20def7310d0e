// Keys and values of committed context, per sequence and drafter layer.
// Position p of a sequence lives in cell p % n_cells. Full layers have a cell for every position of the context;
// sliding layers have a ring of the window plus one block. The block being drafted is written behind the context
// and overwritten by the next commit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/backend.h"
#include "drafter/drafter_config.h"

namespace dspine {

enum class LayerKind { full = 0, sliding = 1 };
inline constexpr int N_LAYER_KINDS = 2;

class DrafterCache {
  public:
    // type: F16, F32 or Q8_0. Throws BackendError when the device has no room, std::invalid_argument for another type.
    DrafterCache(const DrafterConfig & config, const Backend & backend, int32_t n_seq, int32_t n_ctx, ggml_type type);

    LayerKind kind(int il) const { return sliding_[static_cast<size_t>(il)] ? LayerKind::sliding : LayerKind::full; }
    bool has(LayerKind kind) const;
    int64_t n_cells(LayerKind kind) const { return n_cells_[static_cast<int>(kind)]; }
    ggml_tensor * k(int il) const { return k_[static_cast<size_t>(il)]; }  // [n_embd_kv, n_cells * n_seq]
    ggml_tensor * v(int il) const { return v_[static_cast<size_t>(il)]; }  // likewise

    int32_t n_seq() const { return static_cast<int32_t>(seqs_.size()); }
    int32_t n_ctx() const { return n_ctx_; }
    size_t n_bytes() const { return n_bytes_; }
    int32_t length(int32_t seq) const { return seqs_[static_cast<size_t>(seq)].length; }

    // Row of k(il) and v(il) that holds a position.
    int64_t row(LayerKind kind, int32_t seq, int32_t pos) const;
    // Cells that attention has to read for a block of n_block slots, rounded up so that graphs are reused.
    int64_t n_visible(LayerKind kind, int32_t seq, int32_t n_block) const;
    // mask: float16 [n_kv, n_block], 0 or -inf, for the block behind the committed context of `seq`.
    void fill_mask(LayerKind kind, int32_t seq, int32_t n_block, int64_t n_kv, ggml_fp16_t * mask) const;

    // Positions up to `end` (exclusive) are about to be written behind the committed context.
    void note_written(int32_t seq, int32_t end);
    void append(int32_t seq, int32_t n);
    // A length up to n that the sequence can be cut back to without loss: n itself while the rings still hold the
    // window before it, else one window less, from where reading on fills them again before position n.
    int32_t reusable(int32_t seq, int32_t n) const;
    // Positions before a draft that sliding layers see, and may have overwritten; 0 without such layers.
    int32_t lookback() const { return has(LayerKind::sliding) ? window_ - 1 : 0; }
    // What a ring no longer holds stays hidden. Throws std::invalid_argument for a length beyond the present one.
    void truncate(int32_t seq, int32_t n);

    // cache_state.cpp. All that the sequence holds; throws ModelFormatError, before anything has changed.
    std::string save(int32_t seq) const;
    void load(int32_t seq, const std::string & state);

  private:
    template <typename F>
    void for_runs(LayerKind kind, int32_t seq, int32_t first, int32_t end, F f) const;

    struct Sequence {
        int32_t length = 0;
        int32_t oldest = 0;  // first position that the rings hold
    };

    int32_t n_ctx_;
    int64_t cell_step_;
    int32_t window_;
    bool causal_;
    std::vector<bool> sliding_;
    int64_t n_cells_[N_LAYER_KINDS] = {0, 0};
    std::vector<Sequence> seqs_;
    ggml_backend_buffer_ptr buffer_;
    size_t n_bytes_ = 0;
    ggml_context_ptr ctx_;
    std::vector<ggml_tensor *> k_;
    std::vector<ggml_tensor *> v_;
};

}  // namespace dspine
