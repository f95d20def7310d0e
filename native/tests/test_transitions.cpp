#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "check.h"
#include "drafter/transitions.h"
#include "ggml-cpu.h"
#include "tiny_drafter.h"

using namespace dspine;
using test::random_floats;

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// A context that holds tensors with data, and runs graphs on them.
struct Bench {
    ggml_context_ptr ctx{ggml_init({size_t{1} << 24, nullptr, /*no_alloc=*/false})};

    ggml_tensor * floats(const std::vector<float> & values, int64_t ne0, int64_t ne1) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, ne0, ne1);
        CHECK_EQ(values.size(), static_cast<size_t>(ne0 * ne1));
        std::memcpy(t->data, values.data(), ggml_nbytes(t));
        return t;
    }

    ggml_tensor * ints(const std::vector<int32_t> & values, int64_t ne0, int64_t ne1) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, ne0, ne1);
        CHECK_EQ(values.size(), static_cast<size_t>(ne0 * ne1));
        std::memcpy(t->data, values.data(), ggml_nbytes(t));
        return t;
    }

    ggml_tensor * matrix(ggml_type type, int64_t ne0, int64_t ne1, uint32_t seed) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx.get(), type, ne0, ne1);
        const auto values = random_floats(static_cast<size_t>(ne0 * ne1), seed);
        if (type == GGML_TYPE_F32) {
            std::memcpy(t->data, values.data(), ggml_nbytes(t));
        } else {
            ggml_quantize_chunk(type, values.data(), t->data, 0, ne1, ne0, nullptr);
        }
        return t;
    }

    std::vector<int32_t> run(ggml_tensor * t, int n_threads) {
        ggml_cgraph * graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, t);
        CHECK_EQ(ggml_graph_compute_with_ctx(ctx.get(), graph, n_threads), GGML_STATUS_SUCCESS);
        const auto * data = static_cast<const int32_t *>(t->data);
        return {data, data + ggml_nelements(t)};
    }
};

// Numbers sorted downwards, equal ones in their order, NaN last in its order.
std::vector<int32_t> sorted_top(const std::vector<float> & x, size_t k) {
    std::vector<int32_t> ids(x.size());
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
        const float va = x[static_cast<size_t>(a)];
        const float vb = x[static_cast<size_t>(b)];
        return std::isnan(va) || std::isnan(vb) ? !std::isnan(va) && std::isnan(vb) : va > vb;
    });
    ids.resize(k);
    return ids;
}

void check_top(const std::vector<float> & x, int32_t k) {
    Bench bench;
    ggml_tensor * logits = bench.floats(x, static_cast<int64_t>(x.size()), 1);
    const auto found = bench.run(top_candidates(bench.ctx.get(), logits, k), 1);
    CHECK(found == sorted_top(x, static_cast<size_t>(k)));
}

// The definition, in plain floats, of what PathWalk computes (docs/method.md, "Candidates and transitions").
struct PlainWalk {
    const PathWalk & w;

    static std::vector<float> row(const ggml_tensor * m, int64_t i) {
        std::vector<float> out(static_cast<size_t>(m->ne[0]));
        const char * data = static_cast<const char *>(m->data) + static_cast<size_t>(i) * m->nb[1];
        if (m->type == GGML_TYPE_F32) {
            std::memcpy(out.data(), data, out.size() * sizeof(float));
        } else {
            ggml_get_type_traits(m->type)->to_float(data, out.data(), m->ne[0]);
        }
        return out;
    }

    // ggml's products with a Q8_0 matrix round the vector to Q8_0 as well.
    static std::vector<float> rounded(const ggml_tensor * m, std::vector<float> x) {
        if (m->type == GGML_TYPE_Q8_0) {
            std::vector<char> q(ggml_row_size(m->type, m->ne[0]));
            ggml_quantize_chunk(m->type, x.data(), q.data(), 0, 1, m->ne[0], nullptr);
            ggml_get_type_traits(m->type)->to_float(q.data(), x.data(), m->ne[0]);
        }
        return x;
    }

    static double dot(const std::vector<float> & a, const std::vector<float> & b) {
        return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
    }

    std::vector<double> scores(const float * y, const float * gate_f, float scale, int32_t predecessor,
                               const int32_t * candidates) const {
        const size_t m = static_cast<size_t>(w.write->ne[0]);
        const size_t n_embd = static_cast<size_t>(w.write->ne[1]);
        std::vector<float> p = row(w.codes, predecessor);
        for (float & x : p) {
            x *= w.code_scale;
        }
        const auto p_rounded = rounded(w.message_gate, p);
        std::vector<float> message(m);
        for (size_t i = 0; i < m; ++i) {
            const double value = dot(row(w.message_gate, static_cast<int64_t>(i)), p_rounded);
            const double gate = dot(row(w.message_gate, static_cast<int64_t>(m + i)), p_rounded) + gate_f[i];
            message[i] = static_cast<float>(value / (1.0 + std::exp(-gate)));
        }
        message = rounded(w.write, message);
        std::vector<float> u(n_embd);
        double sum = 0.0;
        for (size_t i = 0; i < n_embd; ++i) {
            u[i] = static_cast<float>(y[i] + scale * dot(row(w.write, static_cast<int64_t>(i)), message));
            sum += static_cast<double>(u[i]) * u[i];
        }
        const auto norm = row(w.output_norm, 0);
        for (size_t i = 0; i < n_embd; ++i) {
            u[i] *= static_cast<float>(norm[i] / std::sqrt(sum / static_cast<double>(n_embd) + w.rms_eps));
        }
        u = rounded(w.head, u);
        std::vector<double> out;
        for (int64_t c = 0; c < w.top_k; ++c) {
            out.push_back(dot(row(w.head, candidates[c]), u));
        }
        return out;
    }
};

void compare_with_plain_walk(ggml_type type, int n_threads, double tolerance) {
    constexpr int64_t N_EMBD = 64, RANK = 32, MESSAGE = 96, N_VOCAB = 50, K = 5, N_DRAFT = 6, N_BLOCKS = 3;
    constexpr int64_t N = N_DRAFT * N_BLOCKS;
    Bench bench;
    PathWalk walk;
    walk.n_blocks = N_BLOCKS;
    walk.n_draft = N_DRAFT;
    walk.top_k = K;
    walk.rms_eps = 1e-6f;
    walk.code_scale = std::sqrt(static_cast<float>(RANK));
    walk.codes = bench.matrix(type, RANK, N_VOCAB, 1);
    walk.message_gate = bench.matrix(type, RANK, 2 * MESSAGE, 2);
    walk.write = bench.matrix(type, MESSAGE, N_EMBD, 3);
    walk.output_norm = bench.matrix(GGML_TYPE_F32, N_EMBD, 1, 4);
    walk.head = bench.matrix(type, N_EMBD, N_VOCAB, 5);
    const auto y = random_floats(N_EMBD * N, 6);
    const auto gate_f = random_floats(MESSAGE * N, 7);
    const auto scale = random_floats(N, 8, 0.1f);
    std::vector<int32_t> candidates, anchors;
    for (int64_t i = 0; i < K * N; ++i) {
        candidates.push_back(static_cast<int32_t>((i * 7 + i / K) % N_VOCAB));
    }
    for (int64_t b = 0; b < N_BLOCKS; ++b) {
        anchors.push_back(static_cast<int32_t>(11 * b + 3));
    }
    const auto out = bench.run(
        walk.add_to_graph(bench.ctx.get(), bench.floats(y, N_EMBD, N), bench.floats(gate_f, MESSAGE, N),
                          bench.floats(scale, 1, N), bench.ints(candidates, K, N), bench.ints(anchors, N_BLOCKS, 1)),
        n_threads);

    const PlainWalk plain{walk};
    for (int64_t b = 0; b < N_BLOCKS; ++b) {
        int32_t predecessor = anchors[static_cast<size_t>(b)];
        for (int64_t j = 0; j < N_DRAFT; ++j) {
            const int64_t col = j * N_BLOCKS + b;
            const int32_t * slot = candidates.data() + col * K;
            const auto scores = plain.scores(y.data() + col * N_EMBD, gate_f.data() + col * MESSAGE,
                                             scale[static_cast<size_t>(col)], predecessor, slot);
            const int32_t token = out[static_cast<size_t>(2 * col)];
            float probability;
            std::memcpy(&probability, &out[static_cast<size_t>(2 * col + 1)], sizeof(float));
            const auto chosen = std::find(slot, slot + K, token) - slot;
            CHECK(chosen < K);
            // Rounding may decide between near equals, so the walk is followed, not predicted.
            const double best = *std::max_element(scores.begin(), scores.end());
            CHECK_NEAR(scores[static_cast<size_t>(chosen)], best, tolerance);
            double sum = 0.0;
            for (const double score : scores) {
                sum += std::exp(score - scores[static_cast<size_t>(chosen)]);
            }
            CHECK_NEAR(probability, 1.0 / sum, tolerance);
            predecessor = token;
        }
    }
}

}  // namespace

TEST(top_candidates_equal_a_stable_sort) {
    for (const size_t n : {1, 2, 31, 32, 33, 64, 100, 1000}) {
        for (const size_t k : {size_t{1}, size_t{2}, size_t{16}, n}) {
            if (k <= n) {
                check_top(random_floats(n, static_cast<uint32_t>(n + k)), static_cast<int32_t>(k));
            }
        }
    }
}

TEST(top_candidates_keep_the_order_of_equals) {
    for (const size_t n : {5, 40, 333}) {
        auto x = random_floats(n, 9);
        for (float & v : x) {
            v = std::round(v * 2.0f);
        }
        for (const int32_t k : {1, 3, 5}) {
            check_top(x, k);
        }
        check_top(x, static_cast<int32_t>(n));
        check_top(std::vector<float>(n, 1.5f), 4);
    }
}

TEST(top_candidates_with_infinities) {
    auto x = random_floats(100, 10);
    x[3] = x[40] = x[99] = INF;
    x[0] = x[50] = -INF;
    for (const int32_t k : {1, 2, 4, 100}) {
        check_top(x, k);
    }
    check_top(std::vector<float>(70, -INF), 6);
    check_top(std::vector<float>(70, INF), 6);
}

TEST(top_candidates_take_nan_last) {
    auto x = random_floats(100, 11);
    for (size_t i = 0; i < x.size(); i += 3) {
        x[i] = NOT_A_NUMBER;
    }
    for (const int32_t k : {1, 16, 66}) {
        check_top(x, k);
    }
    x[1] = x[97] = -INF;  // still better than NaN
    for (const int32_t k : {1, 66, 67, 80, 100}) {
        check_top(x, k);
    }
    check_top(std::vector<float>(40, NOT_A_NUMBER), 7);
}

TEST(top_candidates_of_many_columns_do_not_depend_on_threads) {
    const auto x = random_floats(200 * 13, 12);
    Bench bench;
    ggml_tensor * logits = bench.floats(x, 200, 13);
    const auto one = bench.run(top_candidates(bench.ctx.get(), logits, 8), 1);
    const auto four = bench.run(top_candidates(bench.ctx.get(), logits, 8), 4);
    CHECK(one == four);
    for (size_t column = 0; column < 13; ++column) {
        const std::vector<float> part(x.begin() + static_cast<long>(column) * 200,
                                      x.begin() + static_cast<long>(column + 1) * 200);
        const std::vector<int32_t> found(one.begin() + static_cast<long>(column) * 8,
                                         one.begin() + static_cast<long>(column + 1) * 8);
        CHECK(found == sorted_top(part, 8));
    }
}

TEST(walk_scores_follows_the_best_predecessor) {
    constexpr int64_t N_BLOCKS = 2, N_DRAFT = 5, K = 4;
    const auto scores = random_floats(N_BLOCKS * N_DRAFT * K * K, 13, 3.0f);
    std::vector<int32_t> candidates;
    for (int64_t i = 0; i < N_BLOCKS * N_DRAFT * K; ++i) {
        candidates.push_back(static_cast<int32_t>(100 + i));
    }
    const auto drafts = walk_scores(scores, candidates, N_BLOCKS, N_DRAFT, K);
    CHECK_EQ(drafts.size(), size_t{N_BLOCKS});
    for (int64_t b = 0; b < N_BLOCKS; ++b) {
        const Draft & draft = drafts[static_cast<size_t>(b)];
        int64_t before = 0;
        for (int64_t j = 0; j < N_DRAFT; ++j) {
            const int64_t col = j * N_BLOCKS + b;
            const float * row = scores.data() + (col * K + before) * K;
            const int64_t best = std::max_element(row, row + K) - row;
            double sum = 0.0;
            for (int64_t c = 0; c < K; ++c) {
                sum += std::exp(static_cast<double>(row[c]) - row[best]);
            }
            CHECK_EQ(draft.tokens[static_cast<size_t>(j)], candidates[static_cast<size_t>(col * K + best)]);
            CHECK_NEAR(draft.probabilities[static_cast<size_t>(j)], 1.0 / sum, 1e-6);
            before = best;
        }
    }
}

TEST(walk_scores_with_nan_stays_among_the_candidates) {
    const auto drafts = walk_scores(std::vector<float>(2 * 9, NOT_A_NUMBER), {7, 8, 9, 4, 5, 6}, 1, 2, 3);
    CHECK(drafts[0].tokens == (std::vector<int32_t>{7, 4}));
}

TEST(walk_scores_of_one_candidate_is_certain) {
    const auto drafts = walk_scores({0.5f, -3.0f}, {7, 4}, 1, 2, 1);
    CHECK(drafts[0].tokens == (std::vector<int32_t>{7, 4}));
    CHECK(drafts[0].probabilities == (std::vector<float>{1.0f, 1.0f}));
}

TEST(path_walk_equals_plain_floats_with_f32_weights) {
    compare_with_plain_walk(GGML_TYPE_F32, 1, 1e-4);
    compare_with_plain_walk(GGML_TYPE_F32, 2, 1e-4);
}

TEST(path_walk_equals_plain_floats_with_q8_0_weights) {
    compare_with_plain_walk(GGML_TYPE_Q8_0, 1, 2e-2);
    compare_with_plain_walk(GGML_TYPE_Q8_0, 2, 2e-2);
}
