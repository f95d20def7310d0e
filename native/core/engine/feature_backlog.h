// Features of committed positions that the drafter has not read yet. While nothing is drafted, its small commits would
// cost a few percent of every round: they wait here, and are read together before the next draft.
#pragma once

#include <cstddef>
#include <vector>

#include "drafter/draft_source.h"

namespace dspine {

class FeatureBacklog {
  public:
    int32_t size() const { return n_; }
    // Copies rows [n_embd] of every tap behind those that wait.
    void append(const FeatureRows & rows, size_t n_embd);
    // What waits, for one commit. Points into this object.
    FeatureRows rows(int32_t seq, size_t n_embd) const;
    void clear();

  private:
    int32_t n_ = 0;
    std::vector<std::vector<float>> taps_;
};

}  // namespace dspine
