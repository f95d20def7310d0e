#include <algorithm>
#include <map>
#include <random>

#include "check.h"
#include "drafter/drafter_cache.h"

using namespace dspine;

namespace {

constexpr int32_t N_CTX = 400;
constexpr int32_t N_SEQ = 3;
constexpr ggml_fp16_t SEEN = 0x0000;    // 0
constexpr ggml_fp16_t HIDDEN = 0xfc00;  // -inf

struct Shape {
    int32_t window;
    int32_t block_size;
    bool causal = true;
    std::vector<bool> sliding = {false, true};
};

DrafterConfig config_of(const Shape & shape) {
    DrafterConfig c = {};
    c.n_layer = static_cast<int32_t>(shape.sliding.size());
    c.n_head_kv = 1;
    c.head_dim = 32;
    c.window = shape.window;
    c.sliding = shape.sliding;
    c.block_size = shape.block_size;
    c.causal = shape.causal;
    return c;
}

Backend cpu() {
    return start_backend(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), 1);
}

// What lies in the cells of one sequence: the plain truth that the cache's arithmetic has to agree with.
class CellModel {
  public:
    CellModel(const Shape & shape, int64_t n_full, int64_t n_sliding)
        : shape_(shape),
          cells_{std::vector<int32_t>(static_cast<size_t>(n_full), -1),
                 std::vector<int32_t>(static_cast<size_t>(n_sliding), -1)} {}

    void write(int32_t first, int32_t n) {
        for (std::vector<int32_t> & cells : cells_) {
            for (int32_t pos = first; pos < first + n; ++pos) {
                cells[static_cast<size_t>(pos) % cells.size()] = pos;
            }
        }
    }

    // All that a block's first slot at position n may look back to is there.
    bool holds_window_before(LayerKind kind, int32_t n) const {
        const std::vector<int32_t> & cells = cells_[static_cast<int>(kind)];
        for (int32_t pos = kind == LayerKind::full ? 0 : std::max(0, n - (shape_.window - 1)); pos < n; ++pos) {
            if (cells[static_cast<size_t>(pos) % cells.size()] != pos) {
                return false;
            }
        }
        return true;
    }

    // Slot j of the block behind n_committed sees exactly these positions (docs/method.md, "The block"), each in one
    // cell.
    void check_mask(LayerKind kind, int32_t n_committed, int32_t n_block, int64_t n_kv,
                    const ggml_fp16_t * mask) const {
        const std::vector<int32_t> & cells = cells_[static_cast<int>(kind)];
        for (int32_t j = 0; j < n_block; ++j) {
            const int32_t own = n_committed + j;
            const int32_t last = shape_.causal ? own : n_committed + n_block - 1;
            const int32_t first = kind == LayerKind::full ? 0 : std::max(0, own - (shape_.window - 1));
            std::vector<int32_t> expected, seen;
            for (int32_t pos = first; pos <= last; ++pos) {
                if (cells[static_cast<size_t>(pos) % cells.size()] == pos) {  // not one that a cut left overwritten
                    expected.push_back(pos);
                }
            }
            for (int64_t cell = 0; cell < n_kv; ++cell) {
                const ggml_fp16_t value = mask[j * n_kv + cell];
                CHECK(value == SEEN || value == HIDDEN);
                if (value == SEEN) {
                    seen.push_back(cells[static_cast<size_t>(cell)]);
                }
            }
            std::sort(seen.begin(), seen.end());
            CHECK(seen == expected);
        }
    }

  private:
    Shape shape_;
    std::vector<int32_t> cells_[N_LAYER_KINDS];
};

// Commits, drafts and cuts back at random, and compares with the model after every step.
void compare_with_model(const Shape & shape, uint32_t seed, bool cut_back) {
    const Backend backend = cpu();
    DrafterCache cache(config_of(shape), backend, N_SEQ, N_CTX, GGML_TYPE_F16);
    std::vector<CellModel> models(N_SEQ, {shape, cache.n_cells(LayerKind::full), cache.n_cells(LayerKind::sliding)});
    std::mt19937 random(seed);
    const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
    for (int step = 0; step < 150; ++step) {
        const int32_t seq = below(N_SEQ);
        CellModel & model = models[static_cast<size_t>(seq)];
        const int32_t length = cache.length(seq);
        const int32_t n = std::min(1 + below(step % 10 == 0 ? 90 : 12), N_CTX - length);
        if (n > 0) {
            model.write(length, n);
            cache.note_written(seq, length + n);
            cache.append(seq, n);
        }
        const int32_t n_block = shape.causal ? 2 + below(shape.block_size - 1) : shape.block_size;
        model.write(cache.length(seq), n_block);
        cache.note_written(seq, cache.length(seq) + n_block);
        for (const LayerKind kind : {LayerKind::full, LayerKind::sliding}) {
            if (!cache.has(kind)) {
                continue;
            }
            for (const int64_t n_kv : {cache.n_visible(kind, seq, n_block), cache.n_cells(kind)}) {
                std::vector<ggml_fp16_t> mask(static_cast<size_t>(n_block * n_kv));
                cache.fill_mask(kind, seq, n_block, n_kv, mask.data());
                model.check_mask(kind, cache.length(seq), n_block, n_kv, mask.data());
            }
        }
        const auto intact = [&](int32_t to) {
            return !cache.has(LayerKind::sliding) || model.holds_window_before(LayerKind::sliding, to);
        };
        for (int32_t to = 0; step % 10 == 0 && to <= cache.length(seq); ++to) {
            CHECK_EQ(cache.reusable(seq, to), intact(to) ? to : std::max(0, to - (shape.window - 1)));
        }
        if (cut_back || cache.length(seq) == N_CTX) {
            const int32_t back = random() % 4 == 0 ? cache.length(seq) : 1 + below(40);
            const int32_t to = std::max(0, cache.length(seq) - back);
            cache.truncate(seq, to);
            CHECK_EQ(cache.length(seq), to);
        }
    }
}

}  // namespace

TEST(masks_equal_the_model_for_every_window) {
    for (const int32_t window : {2, 3, 5, 16, 63, 64, 65, 200}) {
        for (const int32_t block_size : {2, 6, 16}) {
            compare_with_model({window, block_size}, 1, false);
            compare_with_model({window, block_size}, 2, true);
        }
    }
}

TEST(masks_equal_the_model_where_all_layers_slide) {
    compare_with_model({5, 16, true, {true, true}}, 3, true);
    compare_with_model({40, 6, true, {true}}, 4, true);
}

TEST(masks_equal_the_model_where_no_layer_slides) {
    compare_with_model({0, 16, true, {false, false}}, 5, true);
}

TEST(masks_equal_the_model_for_bidirectional_blocks) {
    compare_with_model({0, 16, false, {false}}, 6, true);
    compare_with_model({5, 16, false}, 7, true);
    compare_with_model({100, 16, false}, 8, true);
}

TEST(window_of_one_sees_only_itself) {
    const Backend backend = cpu();
    DrafterCache cache(config_of({1, 4}), backend, 1, N_CTX, GGML_TYPE_F16);
    cache.append(0, 9);
    std::vector<ggml_fp16_t> mask(4 * 64);
    cache.fill_mask(LayerKind::sliding, 0, 4, 64, mask.data());
    for (int64_t j = 0; j < 4; ++j) {
        for (int64_t cell = 0; cell < 64; ++cell) {
            CHECK_EQ(mask[static_cast<size_t>(j * 64 + cell)], cell == 9 + j ? SEEN : HIDDEN);
        }
    }
}

TEST(rows_of_sequences_never_meet) {
    const Backend backend = cpu();
    const DrafterCache cache(config_of({5, 6}), backend, N_SEQ, N_CTX, GGML_TYPE_F16);
    for (const LayerKind kind : {LayerKind::full, LayerKind::sliding}) {
        const int64_t n_cells = cache.n_cells(kind);
        std::map<int64_t, int32_t> owner;
        for (int32_t seq = 0; seq < N_SEQ; ++seq) {
            for (int32_t pos = 0; pos < N_CTX + 6; ++pos) {
                const int64_t row = cache.row(kind, seq, pos);
                CHECK(row >= 0 && row < n_cells * N_SEQ);
                CHECK_EQ(row % n_cells, pos % n_cells);
                CHECK_EQ(owner.emplace(row, seq).first->second, seq);
            }
        }
    }
    CHECK_EQ(cache.k(0)->ne[1], cache.n_cells(LayerKind::full) * N_SEQ);
    CHECK_EQ(cache.v(1)->ne[1], cache.n_cells(LayerKind::sliding) * N_SEQ);
}

TEST(full_layers_hold_the_whole_context_and_one_block) {
    const Backend backend = cpu();
    for (const int32_t n_ctx : {1, 47, 48, 49, 64, 4096}) {
        const DrafterCache cache(config_of({0, 16, true, {false}}), backend, 1, n_ctx, GGML_TYPE_F16);
        CHECK(cache.n_cells(LayerKind::full) >= n_ctx + 16);
    }
}

TEST(rings_are_bounded_by_the_window) {
    const Backend backend = cpu();
    const DrafterConfig c = config_of({100, 16, true, {true, true}});
    const DrafterCache small(c, backend, 1, 1 << 10, GGML_TYPE_F16);
    const DrafterCache large(c, backend, 1, 1 << 20, GGML_TYPE_F16);
    CHECK_EQ(small.n_bytes(), large.n_bytes());
    CHECK(large.n_cells(LayerKind::sliding) >= 100 + 16);
    const DrafterCache tiny(c, backend, 1, 8, GGML_TYPE_F16);  // and by the context, where that is less
    CHECK_EQ(tiny.n_cells(LayerKind::sliding), tiny.n_cells(LayerKind::full));
}

TEST(cut_back_beyond_the_ring_needs_one_window_more) {
    const Backend backend = cpu();
    DrafterCache cache(config_of({5, 6}), backend, 1, N_CTX, GGML_TYPE_F16);
    cache.append(0, 300);
    CHECK_EQ(cache.reusable(0, 290), 290);
    CHECK_EQ(cache.reusable(0, 1000), 300);
    CHECK_EQ(cache.reusable(0, 100), 100 - 4);
    CHECK_THROWS(std::invalid_argument, "cannot be cut back to 301", cache.truncate(0, 301));
    CHECK_THROWS(std::invalid_argument, "cannot be cut back to -1", cache.truncate(0, -1));
    CHECK_EQ(cache.length(0), 300);
    cache.truncate(0, 96);
    cache.append(0, 4);
    CHECK_EQ(cache.reusable(0, 100), 100);  // read again: whole
    cache.truncate(0, 0);
    cache.append(0, 20);
    CHECK_EQ(cache.reusable(0, 10), 10);  // the emptied sequence has forgotten its old length
}

TEST(cache_types_are_checked) {
    const Backend backend = cpu();
    DrafterConfig c = config_of({5, 6});
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
        CHECK_EQ(DrafterCache(c, backend, 1, 64, type).k(0)->type, type);
    }
    CHECK_THROWS(std::invalid_argument, "cannot be q4_0", DrafterCache(c, backend, 1, 64, GGML_TYPE_Q4_0));
    c.head_dim = 24;
    CHECK_THROWS(std::invalid_argument, "heads in multiples of 32", DrafterCache(c, backend, 1, 64, GGML_TYPE_Q8_0));
}
