#include "engine/feature_backlog.h"

namespace dspine {

void FeatureBacklog::append(const FeatureRows & rows, size_t n_embd) {
    taps_.resize(rows.taps.size());
    for (size_t t = 0; t < rows.taps.size(); ++t) {
        for (int32_t i = 0; i < rows.n; ++i) {
            const float * row = rows.taps[t] + static_cast<size_t>(i) * rows.stride;
            taps_[t].insert(taps_[t].end(), row, row + n_embd);
        }
    }
    n_ += rows.n;
}

FeatureRows FeatureBacklog::rows(int32_t seq, size_t n_embd) const {
    FeatureRows all = {seq, n_, {}, n_embd};
    for (const std::vector<float> & tap : taps_) {
        all.taps.push_back(tap.data());
    }
    return all;
}

void FeatureBacklog::clear() {
    n_ = 0;
    for (std::vector<float> & tap : taps_) {
        tap.clear();
    }
}

}  // namespace dspine
