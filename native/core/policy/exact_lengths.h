// Draft lengths that change nothing (docs/lossless.md): those whose decode gives every row the bits that it has alone.
// Called by the engine, which is told what an audit has measured.
#pragma once

#include <cstdint>
#include <vector>

namespace dspine {

class ExactLengths {
  public:
    // Positions from `first` up to, not including, `last`.
    struct Range {
        int32_t first;
        int32_t last;
    };
    // by_length[k - 1]: where a decode of k + 1 tokens, which all lie in one of the ranges, is exact.
    // Throws std::invalid_argument for a range that is none.
    explicit ExactLengths(std::vector<std::vector<Range>> by_length);

    // The lengths, 1 to `limit`, of drafts that may be verified behind n committed positions; in rising order.
    std::vector<int32_t> at(int32_t n, int32_t limit) const;
    // 0: no draft is exact anywhere.
    int32_t longest() const;

  private:
    std::vector<std::vector<Range>> by_length_;
};

// The longest of these (rising) up to `limit`, or 0.
int32_t longest_of(const std::vector<int32_t> & lengths, int32_t limit);

}  // namespace dspine
