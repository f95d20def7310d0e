// A block with all that a parity case compares.
#include <algorithm>
#include <numeric>

#include "drafter/drafter.h"
#include "drafter/tensor_io.h"

namespace dspine {
namespace {

// Devices find the largest logits in any order. Here: the largest first, and scores by it.
void sort_candidates(BlockTrace & t, int32_t n_draft, int32_t top_k, int64_t n_vocab) {
    const size_t k = static_cast<size_t>(top_k);
    std::vector<size_t> before;  // of the slot before; slot 1 has the anchor, k times
    for (size_t j = 0; j < static_cast<size_t>(n_draft); ++j) {
        const float * logits = t.logits.data() + j * static_cast<size_t>(n_vocab);
        const auto first = t.candidates.begin() + static_cast<std::ptrdiff_t>(j * k);
        const std::vector<int32_t> found(first, first + top_k);
        std::vector<size_t> order(k);
        std::iota(order.begin(), order.end(), size_t{0});
        std::stable_sort(order.begin(), order.end(),
                         [&](size_t a, size_t b) { return logits[found[a]] > logits[found[b]]; });
        std::vector<float> sorted(k * k);
        for (size_t p = 0; p < k; ++p) {
            first[static_cast<std::ptrdiff_t>(p)] = found[order[p]];
            for (size_t c = 0; c < k && !t.scores.empty(); ++c) {
                const size_t row = before.empty() ? p : before[p];
                sorted[p * k + c] = t.scores[(j * k + row) * k + order[c]];
            }
        }
        if (!t.scores.empty()) {
            std::copy(sorted.begin(), sorted.end(), t.scores.begin() + static_cast<std::ptrdiff_t>(j * k * k));
        }
        before = order;
    }
}

}  // namespace

BlockTrace Drafter::trace(const BlockRequest & block, int32_t n_draft) {
    draft({block}, n_draft);  // checks, and the order that is not traced
    const DraftGraph & g = prepare({block}, shape_for({block}, n_draft, true));
    compute(g.graph, "draft");
    BlockTrace t;
    t.draft = read_drafts(g)[0];
    const auto all = [](const std::vector<ggml_tensor *> & tensors) {
        std::vector<std::vector<float>> out;
        for (const ggml_tensor * tensor : tensors) {
            out.push_back(download<float>(tensor));
        }
        return out;
    };
    t.pre_injection = all(g.trace.pre_injection);
    t.post_injection = all(g.trace.post_injection);
    t.layer_features = all(g.trace.layer_features);
    t.final_hidden = download<float>(g.trace.final_hidden);
    t.logits = download<float>(g.logits);
    t.candidates = download<int32_t>(g.candidates);
    if (g.scores != nullptr) {
        t.scores = download<float>(g.scores);
    }
    if (config_.injection) {
        sort_candidates(t, n_draft, config_.top_k, config_.n_vocab);
    }
    return t;
}

}  // namespace dspine
