#include "policy/cost_table.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace dspine {
namespace {

// Parts of the (logarithmic) surprise that an observation moves its own point, and all of them. A point's first ones
// move it more: neighbours must not differ by the noise of a few calls.
constexpr double POINT_RATE = 0.025;
constexpr double FIRST_CALLS = 1.0;  // that a point measured at load counts for
// A point that was observed less often than this is believed to cost no more than a better known larger one.
constexpr double FEW_CALLS = 8.0;
constexpr double SCALE_RATE = 0.03;
constexpr double LARGEST_SURPRISE = 1.5;

}  // namespace

CostTable::CostTable(const std::vector<CostPoint> & points) : points_(points), n_calls_(points.size(), FIRST_CALLS) {
    int32_t before = 0;
    for (const CostPoint & p : points_) {
        if (p.n <= before || !std::isfinite(p.us) || p.us <= 0.0) {
            throw std::invalid_argument("a cost of " + std::to_string(p.us) + " us for " + std::to_string(p.n) +
                                        " columns behind " + std::to_string(before) +
                                        ", expected positive costs in rising order");
        }
        before = p.n;
    }
    if (points_.empty()) {
        throw std::invalid_argument("no cost was measured, expected at least one");
    }
}

double CostTable::at(int32_t n) const {
    if (n <= 0) {
        return 0.0;
    }
    double us = interpolated(n);
    for (size_t i = 0; i < points_.size(); ++i) {
        if (points_[i].n == n && n_calls_[i] >= FEW_CALLS) {
            break;  // known by itself; points are in rising order
        }
        if (points_[i].n > n && n_calls_[i] >= FEW_CALLS) {
            us = std::min(us, points_[i].us);
        }
    }
    return us * scale_;
}

double CostTable::interpolated(int32_t n) const {
    const auto after =
        std::lower_bound(points_.begin(), points_.end(), n, [](const CostPoint & p, int32_t key) { return p.n < key; });
    if (after != points_.end() && (after->n == n || after == points_.begin())) {
        return after->us;
    }
    if (points_.size() == 1) {
        return points_[0].us / points_[0].n * n;
    }
    const auto right = after == points_.end() ? after - 1 : after;
    const auto left = right - 1;
    const double slope = (right->us - left->us) / (right->n - left->n);
    // Beyond the last point, more columns never come for free.
    return after == points_.end() ? right->us + std::max(slope, 0.0) * (n - right->n)
                                  : left->us + slope * (n - left->n);
}

void CostTable::observe(int32_t n, double us) {
    if (n <= 0 || !std::isfinite(us) || us <= 0.0) {
        return;
    }
    auto point =
        std::lower_bound(points_.begin(), points_.end(), n, [](const CostPoint & p, int32_t key) { return p.n < key; });
    if (point == points_.end() || point->n != n) {
        const double expected = at(n) / scale_;
        n_calls_.insert(n_calls_.begin() + (point - points_.begin()), 0.0);
        point = points_.insert(point, {n, expected});
    }
    point->us = at(n) / scale_;
    double & n_calls = n_calls_[static_cast<size_t>(point - points_.begin())];
    n_calls += 1.0;
    const double surprise = std::clamp(us / (point->us * scale_), 1.0 / LARGEST_SURPRISE, LARGEST_SURPRISE);
    point->us *= std::pow(surprise, std::max(POINT_RATE, 1.0 / n_calls));
    scale_ *= std::pow(surprise, SCALE_RATE);
}

std::vector<CostPoint> CostTable::points() const {
    std::vector<CostPoint> out = points_;
    for (CostPoint & p : out) {
        p.us *= scale_;
    }
    return out;
}

}  // namespace dspine
