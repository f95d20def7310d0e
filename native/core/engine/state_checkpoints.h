// States that recurrent targets had at earlier lengths of their slots, which they cannot be cut back to. Bounded in
// bytes: what was used longest ago goes first. Called by the engine (prefix_reuse.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dspine {

class StateCheckpoints {
  public:
    // 0: none are kept.
    explicit StateCheckpoints(size_t max_bytes) : max_bytes_(max_bytes) {}

    bool enabled() const { return max_bytes_ > 0; }
    size_t bytes() const;
    // The longest length of the slot, up to n, that has one; 0: none.
    int32_t longest(int32_t slot, int32_t n) const;
    // Of a length that has one; it counts as used now.
    const std::string & use(int32_t slot, int32_t n);
    // Makes room for it; a state larger than all the room is not kept.
    void add(int32_t slot, int32_t n, std::string state);
    // The slot's tokens from n on are others now: longer lengths are dropped.
    void cut(int32_t slot, int32_t n);

  private:
    struct Checkpoint {
        int32_t slot;
        int32_t n;
        int64_t last_used;
        std::string state;
    };
    size_t max_bytes_;
    int64_t clock_ = 0;
    std::vector<Checkpoint> all_;
};

}  // namespace dspine
