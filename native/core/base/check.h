// Ranges of options, checked before anything is computed from them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace dspine {

inline constexpr int32_t MAX_THREADS = 512;        // what ggml's own thread pool holds
inline constexpr int32_t MAX_POSITIONS = 1 << 30;  // of one sequence, and of all together: sums of two stay in int32

// Throws std::invalid_argument that names the value and its range.
inline void need_range(const char * name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) {
        throw std::invalid_argument(std::string(name) + " = " + std::to_string(value) + ", expected " +
                                    std::to_string(low) + " to " + std::to_string(high));
    }
}

}  // namespace dspine
