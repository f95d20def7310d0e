#include "policy/forecast.h"

#include <algorithm>

namespace dspine {
namespace {

constexpr double FIRST_GUESS = 0.7;     // before any draft: enough to try one
constexpr double PRIOR_STRENGTH = 8.0;  // drafts that the prior counts for
constexpr double SHIFT_RATE = 0.08;
constexpr double SHIFT_KEEP = 0.99;
constexpr double LARGEST_SHIFT = 3.0;

}  // namespace

Forecast::Forecast(double memory) : keep_(1.0 - 1.0 / memory) {}

double Forecast::at(int32_t position, const Forecast * prior) const {
    const size_t i = static_cast<size_t>(position);
    if (i >= reached_.size()) {
        // Nothing was drafted so far out. Like the prior there, or like the position before it.
        if (prior != nullptr && i < prior->reached_.size()) {
            return prior->at(position, nullptr);
        }
        return position > 0 && !reached_.empty() ? at(static_cast<int32_t>(reached_.size()) - 1, prior)
               : prior != nullptr                ? prior->at(position, nullptr)
                                                 : FIRST_GUESS;
    }
    const double expected = prior != nullptr ? prior->at(position, nullptr) : FIRST_GUESS;
    return (accepted_[i] + expected * PRIOR_STRENGTH) / (reached_[i] + PRIOR_STRENGTH);
}

void Forecast::observe(const std::vector<double> & conditional) {
    if (conditional.size() > reached_.size()) {
        reached_.resize(conditional.size(), 0.0);
        accepted_.resize(conditional.size(), 0.0);
    }
    double reach = 1.0;
    for (size_t i = 0; i < conditional.size(); ++i) {
        reached_[i] = reached_[i] * keep_ + reach;
        reach *= conditional[i];
        accepted_[i] = accepted_[i] * keep_ + reach;
    }
}

void Forecast::forget() {
    for (size_t i = 0; i < reached_.size(); ++i) {
        reached_[i] *= keep_;
        accepted_[i] *= keep_;
    }
    shift_ *= keep_;
}

void Forecast::correct(double surprise) {
    shift_ = std::clamp(shift_ * SHIFT_KEEP + SHIFT_RATE * surprise, -LARGEST_SHIFT, LARGEST_SHIFT);
}

}  // namespace dspine
