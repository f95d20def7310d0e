#include "policy/calibration.h"

#include <algorithm>
#include <cmath>

namespace dspine {
namespace {

constexpr double EDGES[] = {0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99};
constexpr double FORGET = 0.99;         // per observation of a bin: it remembers about a hundred
constexpr double PRIOR_STRENGTH = 4.0;  // observations that the prior counts for
constexpr double UNKNOWN_PRIOR = 0.5;   // of a drafter that gives no probabilities

}  // namespace

void Calibration::Counts::add(bool yes) {
    n = n * FORGET + 1.0;
    accepted = accepted * FORGET + (yes ? 1.0 : 0.0);
}

size_t Calibration::bin(float q) {
    if (std::isnan(q)) {
        return N_BINS - 1;
    }
    return static_cast<size_t>(std::upper_bound(std::begin(EDGES), std::end(EDGES), static_cast<double>(q)) -
                               std::begin(EDGES));
}

size_t Calibration::position_class(int32_t position) {
    return position < 2 ? static_cast<size_t>(std::max(0, position)) : position < 4 ? 2 : position < 8 ? 3 : 4;
}

double Calibration::at(int32_t position, float q) const {
    const size_t b = bin(q);
    // Until something is known, the drafter is taken at its word.
    const double prior = std::isnan(q) ? UNKNOWN_PRIOR : std::clamp(static_cast<double>(q), 0.0, 1.0);
    return by_class_[position_class(position)][b].mean(all_[b].mean(prior, PRIOR_STRENGTH), PRIOR_STRENGTH);
}

void Calibration::observe(int32_t position, float q, bool accepted) {
    const size_t b = bin(q);
    all_[b].add(accepted);
    by_class_[position_class(position)][b].add(accepted);
}

}  // namespace dspine
