#include "policy/exact_lengths.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace dspine {

ExactLengths::ExactLengths(std::vector<std::vector<Range>> by_length) : by_length_(std::move(by_length)) {
    for (const std::vector<Range> & ranges : by_length_) {
        for (const Range & range : ranges) {
            if (range.first < 0 || range.last <= range.first) {
                throw std::invalid_argument("positions " + std::to_string(range.first) + " to " +
                                            std::to_string(range.last) + " are no range, expected rising ones");
            }
        }
    }
}

std::vector<int32_t> ExactLengths::at(int32_t n, int32_t limit) const {
    std::vector<int32_t> lengths;
    const int32_t longest = std::min(limit, static_cast<int32_t>(by_length_.size()));
    for (int32_t k = 1; k <= longest; ++k) {
        const std::vector<Range> & ranges = by_length_[static_cast<size_t>(k) - 1];
        // The anchor is at position n, the draft's last token at n + k.
        if (std::any_of(ranges.begin(), ranges.end(),
                        [&](const Range & r) { return n >= r.first && n + k < r.last; })) {
            lengths.push_back(k);
        }
    }
    return lengths;
}

int32_t ExactLengths::longest() const {
    for (size_t k = by_length_.size(); k > 0; --k) {
        if (!by_length_[k - 1].empty()) {
            return static_cast<int32_t>(k);
        }
    }
    return 0;
}

int32_t longest_of(const std::vector<int32_t> & lengths, int32_t limit) {
    const auto beyond = std::upper_bound(lengths.begin(), lengths.end(), limit);
    return beyond == lengths.begin() ? 0 : *(beyond - 1);
}

}  // namespace dspine
