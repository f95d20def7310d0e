#include "drafter/transitions.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ggml-cpu.h"

namespace dspine {
namespace {

template <typename T>
const T * column(const ggml_tensor * t, int64_t i) {
    return reinterpret_cast<const T *>(static_cast<const char *>(t->data) + static_cast<size_t>(i) * t->nb[1]);
}

template <typename T>
T * column(ggml_tensor * t, int64_t i) {
    return reinterpret_cast<T *>(static_cast<char *>(t->data) + static_cast<size_t>(i) * t->nb[1]);
}

void find_top(const float * x, int64_t n, int32_t * ids, int32_t k) {
    constexpr int64_t STEP = 32;
    const float lowest = -std::numeric_limits<float>::infinity();
    std::vector<float> best(static_cast<size_t>(k), lowest);
    int32_t n_found = 0;
    const auto offer = [&](int64_t i) {
        if (n_found == k ? !(x[i] > best[static_cast<size_t>(k - 1)]) : std::isnan(x[i])) {
            return;
        }
        int32_t at = n_found < k ? n_found++ : k - 1;
        for (; at > 0 && best[static_cast<size_t>(at - 1)] < x[i]; --at) {
            best[static_cast<size_t>(at)] = best[static_cast<size_t>(at - 1)];
            ids[at] = ids[at - 1];
        }
        best[static_cast<size_t>(at)] = x[i];
        ids[at] = static_cast<int32_t>(i);
    };
    int64_t i = 0;
    while (i < n && n_found < k) {
        offer(i++);
    }
    // Almost no value passes the threshold: test many at once, look closer only when one does.
    for (; i + STEP <= n; i += STEP) {
        const float threshold = best[static_cast<size_t>(k - 1)];
        int any = 0;
        for (int64_t j = 0; j < STEP; ++j) {
            any |= x[i + j] > threshold ? 1 : 0;
        }
        for (int64_t j = 0; any != 0 && j < STEP; ++j) {
            offer(i + j);
        }
    }
    for (; i < n; ++i) {
        offer(i);
    }
    for (int32_t fill = 0; n_found < k; ++fill) {  // only when NaN left fewer than k values
        if (std::find(ids, ids + n_found, fill) == ids + n_found) {
            ids[n_found++] = fill;
        }
    }
}

void top_candidates_op(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * logits = dst->src[0];
    for (int64_t i = ith; i < dst->ne[1]; i += nth) {
        find_top(column<float>(logits, i), logits->ne[0], column<int32_t>(dst, i), static_cast<int32_t>(dst->ne[0]));
    }
}

// Products of one vector with rows of a matrix of any type, by ggml's own kernels.
class RowProducts {
  public:
    RowProducts(const ggml_tensor * matrix, const float * x, std::vector<char> & scratch)
        : matrix_(matrix), traits_(ggml_get_type_traits_cpu(matrix->type)) {
        const int64_t n = matrix->ne[0];
        scratch.resize(ggml_row_size(traits_->vec_dot_type, n));
        if (traits_->vec_dot_type == GGML_TYPE_F32) {
            std::memcpy(scratch.data(), x, static_cast<size_t>(n) * sizeof(float));
        } else {
            ggml_get_type_traits_cpu(traits_->vec_dot_type)->from_float(x, scratch.data(), n);
        }
        x_ = scratch.data();
    }

    float operator()(int64_t row) const {
        float product = 0.0f;
        traits_->vec_dot(static_cast<int>(matrix_->ne[0]), &product, 0, column<char>(matrix_, row), 0, x_, 0, 1);
        return product;
    }

  private:
    const ggml_tensor * matrix_;
    const ggml_type_traits_cpu * traits_;
    const void * x_;
};

struct Scratch {
    std::vector<float> code, both, message, u, scores;
    std::vector<char> row;
};

// The best candidate, and its probability among them. Written so that NaN scores give the first candidate.
std::pair<int64_t, float> choose(const float * scores, int64_t k) {
    int64_t best = 0;
    for (int64_t c = 1; c < k; ++c) {
        best = scores[c] > scores[best] ? c : best;
    }
    float sum = 0.0f;
    for (int64_t c = 0; c < k; ++c) {
        sum += std::exp(scores[c] - scores[best]);
    }
    return {best, 1.0f / sum};
}

void score_candidates(const PathWalk & w, const ggml_tensor * dst, int64_t col, int32_t predecessor, Scratch & s) {
    const int64_t rank = w.codes->ne[0];
    const int64_t m = w.write->ne[0];
    const int64_t n_embd = w.write->ne[1];
    const float * y = column<float>(dst->src[0], col);
    const float * gate_f = column<float>(dst->src[1], col);
    const float scale = *column<float>(dst->src[2], col);
    const int32_t * candidates = column<int32_t>(dst->src[3], col);

    s.code.resize(static_cast<size_t>(rank));
    if (w.codes->type == GGML_TYPE_F32) {
        std::memcpy(s.code.data(), column<char>(w.codes, predecessor), s.code.size() * sizeof(float));
    } else {
        ggml_get_type_traits(w.codes->type)->to_float(column<char>(w.codes, predecessor), s.code.data(), rank);
    }
    for (float & x : s.code) {
        x *= w.code_scale;
    }
    s.message.resize(static_cast<size_t>(m));
    {
        const RowProducts both(w.message_gate, s.code.data(), s.row);
        for (int64_t i = 0; i < m; ++i) {
            const float gate = 1.0f / (1.0f + std::exp(-(both(m + i) + gate_f[i])));
            s.message[static_cast<size_t>(i)] = gate * both(i);
        }
    }
    s.u.resize(static_cast<size_t>(n_embd));
    double sum = 0.0;
    {
        const RowProducts update(w.write, s.message.data(), s.row);
        for (int64_t i = 0; i < n_embd; ++i) {
            const float x = y[i] + scale * update(i);
            s.u[static_cast<size_t>(i)] = x;
            sum += static_cast<double>(x) * x;
        }
    }
    const float inverse = 1.0f / std::sqrt(static_cast<float>(sum / static_cast<double>(n_embd)) + w.rms_eps);
    const float * norm = static_cast<const float *>(w.output_norm->data);
    for (int64_t i = 0; i < n_embd; ++i) {
        s.u[static_cast<size_t>(i)] *= inverse * norm[i];
    }
    s.scores.resize(static_cast<size_t>(w.top_k));
    const RowProducts head(w.head, s.u.data(), s.row);
    for (int64_t c = 0; c < w.top_k; ++c) {
        s.scores[static_cast<size_t>(c)] = head(candidates[c]);
    }
}

void path_walk_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const PathWalk & w = *static_cast<const PathWalk *>(userdata);
    thread_local Scratch scratch;
    for (int64_t block = ith; block < w.n_blocks; block += nth) {
        int32_t predecessor = static_cast<const int32_t *>(dst->src[4]->data)[block];
        for (int64_t j = 0; j < w.n_draft; ++j) {
            const int64_t col = j * w.n_blocks + block;
            score_candidates(w, dst, col, predecessor, scratch);
            const auto [best, probability] = choose(scratch.scores.data(), w.top_k);
            predecessor = column<int32_t>(dst->src[3], col)[best];
            int32_t * out = column<int32_t>(dst, col);
            out[0] = predecessor;
            std::memcpy(&out[1], &probability, sizeof(float));
        }
    }
}

}  // namespace

ggml_tensor * top_candidates(ggml_context * ctx, ggml_tensor * logits, int32_t k) {
    ggml_tensor * args[] = {logits};
    return ggml_custom_4d(ctx, GGML_TYPE_I32, k, logits->ne[1], 1, 1, args, 1, top_candidates_op, GGML_N_TASKS_MAX,
                          nullptr);
}

ggml_tensor * PathWalk::add_to_graph(ggml_context * ctx, ggml_tensor * y, ggml_tensor * gate_f, ggml_tensor * scale,
                                     ggml_tensor * candidates, ggml_tensor * anchors) {
    ggml_tensor * args[] = {y, gate_f, scale, candidates, anchors};
    return ggml_custom_4d(ctx, GGML_TYPE_I32, 2, n_draft * n_blocks, 1, 1, args, 5, path_walk_op, GGML_N_TASKS_MAX,
                          this);
}

std::vector<Draft> walk_scores(const std::vector<float> & scores, const std::vector<int32_t> & candidates,
                               int64_t n_blocks, int64_t n_draft, int64_t k) {
    std::vector<Draft> drafts(static_cast<size_t>(n_blocks));
    for (int64_t block = 0; block < n_blocks; ++block) {
        Draft & draft = drafts[static_cast<size_t>(block)];
        int64_t predecessor = 0;  // its place among the candidates of the slot before
        for (int64_t j = 0; j < n_draft; ++j) {
            const int64_t col = j * n_blocks + block;
            const auto [best, probability] = choose(scores.data() + (col * k + predecessor) * k, k);
            predecessor = best;
            draft.tokens.push_back(candidates[static_cast<size_t>(col * k + best)]);
            draft.probabilities.push_back(probability);
        }
    }
    return drafts;
}

}  // namespace dspine
