// Costs as Python sees them: pairs of columns and microseconds.
#pragma once

#include <utility>
#include <vector>

#include "policy/cost_table.h"

namespace dspine {

using Points = std::vector<std::pair<int32_t, double>>;

inline std::vector<CostPoint> to_costs(const Points & points) {
    std::vector<CostPoint> out;
    for (const auto & [n, us] : points) {
        out.push_back({n, us});
    }
    return out;
}

inline Points from_costs(const std::vector<CostPoint> & costs) {
    Points out;
    for (const CostPoint & p : costs) {
        out.emplace_back(p.n, p.us);
    }
    return out;
}

}  // namespace dspine
