#include "drafter/drafter_cache.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace dspine {
namespace {

// Attention reads whole multiples of this many cells: one graph serves as many rounds. Devices' kernels of flash
// attention want more, CUDA's for heads of 512 values even demand it.
constexpr int64_t CELL_STEP_CPU = 64;
constexpr int64_t CELL_STEP_DEVICE = 256;

int64_t round_up(int64_t n, int64_t step) {
    return (n + step - 1) / step * step;
}

}  // namespace

DrafterCache::DrafterCache(const DrafterConfig & c, const Backend & backend, int32_t n_seq, int32_t n_ctx,
                           ggml_type type)
    : n_ctx_(n_ctx),
      cell_step_(backend.is_cpu ? CELL_STEP_CPU : CELL_STEP_DEVICE),
      window_(c.window),
      causal_(c.causal),
      sliding_(c.sliding),
      seqs_(static_cast<size_t>(n_seq)) {
    if (type != GGML_TYPE_F16 && type != GGML_TYPE_F32 && type != GGML_TYPE_Q8_0) {
        throw std::invalid_argument(std::string("the drafter's cache cannot be ") + ggml_type_name(type) +
                                    ", expected f16, f32 or q8_0");
    }
    if (c.head_dim % ggml_blck_size(type) != 0) {
        throw std::invalid_argument("a " + std::string(ggml_type_name(type)) + " cache needs heads in multiples of " +
                                    std::to_string(ggml_blck_size(type)) + ", the drafter's have " +
                                    std::to_string(c.head_dim));
    }
    n_cells_[static_cast<int>(LayerKind::full)] = round_up(int64_t{n_ctx} + c.block_size, cell_step_);
    n_cells_[static_cast<int>(LayerKind::sliding)] =
        std::min(n_cells_[static_cast<int>(LayerKind::full)], round_up(int64_t{c.window} + c.block_size, cell_step_));

    ctx_ = make_context(static_cast<size_t>(c.n_layer) * 2);
    for (int il = 0; il < c.n_layer; ++il) {
        const int64_t n_rows = n_cells(kind(il)) * n_seq;
        k_.push_back(ggml_new_tensor_2d(ctx_.get(), type, c.n_embd_kv(), n_rows));
        v_.push_back(ggml_new_tensor_2d(ctx_.get(), type, c.n_embd_kv(), n_rows));
    }
    buffer_ = allocate(ctx_.get(), backend, "the drafter's cache");
    n_bytes_ = allocated_bytes(ctx_.get(), buffer_.get(), backend);
    ggml_backend_buffer_clear(buffer_.get(), 0);  // hidden cells are multiplied by zero: they must be finite
}

bool DrafterCache::has(LayerKind kind) const {
    return std::find(sliding_.begin(), sliding_.end(), kind == LayerKind::sliding) != sliding_.end();
}

int64_t DrafterCache::row(LayerKind kind, int32_t seq, int32_t pos) const {
    return seq * n_cells(kind) + pos % n_cells(kind);
}

int64_t DrafterCache::n_visible(LayerKind kind, int32_t seq, int32_t n_block) const {
    return std::min(n_cells(kind), round_up(int64_t{length(seq)} + n_block, cell_step_));
}

void DrafterCache::fill_mask(LayerKind kind, int32_t seq, int32_t n_block, int64_t n_kv, ggml_fp16_t * mask) const {
    const ggml_fp16_t seen = ggml_fp32_to_fp16(0.0f);
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY);
    const int64_t n_ring = n_cells(kind);
    const int64_t n_committed = length(seq);
    const int64_t oldest = seqs_[static_cast<size_t>(seq)].oldest;
    const int64_t last = n_committed + n_block - 1;
    for (int64_t cell = 0; cell < n_kv; ++cell) {
        // The newest position not above `last` that maps to this cell.
        const int64_t age = (last - cell) % n_ring;
        const int64_t pos = last - (age < 0 ? age + n_ring : age);
        for (int64_t j = 0; j < n_block; ++j) {
            const int64_t own = n_committed + j;
            const bool in_window = kind == LayerKind::full || (pos >= own - (window_ - 1) && pos >= oldest);
            const bool in_order = causal_ ? pos <= own : true;
            mask[j * n_kv + cell] = pos >= 0 && in_window && in_order ? seen : hidden;
        }
    }
}

void DrafterCache::note_written(int32_t seq, int32_t end) {
    Sequence & s = seqs_[static_cast<size_t>(seq)];
    s.oldest = std::max(s.oldest, static_cast<int32_t>(end - n_cells(LayerKind::sliding)));
}

void DrafterCache::append(int32_t seq, int32_t n) {
    Sequence & s = seqs_[static_cast<size_t>(seq)];
    s.length += n;
    note_written(seq, s.length);
}

int32_t DrafterCache::reusable(int32_t seq, int32_t n) const {
    const Sequence & s = seqs_[static_cast<size_t>(seq)];
    n = std::min(n, s.length);
    const int32_t first_seen = std::max(0, n - lookback());
    return !has(LayerKind::sliding) || s.oldest <= first_seen ? n : first_seen;
}

void DrafterCache::truncate(int32_t seq, int32_t n) {
    Sequence & s = seqs_[static_cast<size_t>(seq)];
    if (n < 0 || n > s.length) {
        throw std::invalid_argument("the drafter's cache holds " + std::to_string(s.length) +
                                    " positions of sequence " + std::to_string(seq) + " and cannot be cut back to " +
                                    std::to_string(n));
    }
    s.length = n;
    s.oldest = std::min(s.oldest, n);
}

}  // namespace dspine
