#include "engine/state_checkpoints.h"

#include <algorithm>
#include <stdexcept>

namespace dspine {

size_t StateCheckpoints::bytes() const {
    size_t sum = 0;
    for (const Checkpoint & c : all_) {
        sum += c.state.size();
    }
    return sum;
}

int32_t StateCheckpoints::longest(int32_t slot, int32_t n) const {
    int32_t best = 0;
    for (const Checkpoint & c : all_) {
        best = c.slot == slot && c.n <= n ? std::max(best, c.n) : best;
    }
    return best;
}

const std::string & StateCheckpoints::use(int32_t slot, int32_t n) {
    const auto found =
        std::find_if(all_.begin(), all_.end(), [&](const Checkpoint & c) { return c.slot == slot && c.n == n; });
    if (found == all_.end()) {
        throw std::invalid_argument("no checkpoint of slot " + std::to_string(slot) + " at " + std::to_string(n));
    }
    found->last_used = ++clock_;
    return found->state;
}

void StateCheckpoints::add(int32_t slot, int32_t n, std::string state) {
    if (state.size() > max_bytes_) {
        return;
    }
    const auto older = [](const Checkpoint & a, const Checkpoint & b) { return a.last_used < b.last_used; };
    while (bytes() + state.size() > max_bytes_) {
        all_.erase(std::min_element(all_.begin(), all_.end(), older));
    }
    all_.push_back({slot, n, ++clock_, std::move(state)});
}

void StateCheckpoints::cut(int32_t slot, int32_t n) {
    all_.erase(
        std::remove_if(all_.begin(), all_.end(), [&](const Checkpoint & c) { return c.slot == slot && c.n > n; }),
        all_.end());
}

}  // namespace dspine
