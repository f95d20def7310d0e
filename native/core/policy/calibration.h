// How often drafted tokens are accepted, by what the drafter thought of them: its path probabilities, calibrated
// online.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace dspine {

// The probability that a draft's token is accepted given that all before it are. Counts in bins of the drafter's own
// probability, for all positions together and for each class of positions; what is old is slowly forgotten.
class Calibration {
  public:
    // position: 0 is the first drafted token. q: the drafter's probability of it; NaN where it gives none.
    double at(int32_t position, float q) const;
    void observe(int32_t position, float q, bool accepted);

  private:
    static constexpr size_t N_BINS = 14;    // the last: no probability given
    static constexpr size_t N_CLASSES = 5;  // of positions
    struct Counts {
        double n = 0.0;
        double accepted = 0.0;
        void add(bool yes);
        double mean(double prior, double strength) const { return (accepted + prior * strength) / (n + strength); }
    };
    static size_t bin(float q);
    static size_t position_class(int32_t position);

    std::array<Counts, N_BINS> all_;
    std::array<std::array<Counts, N_BINS>, N_CLASSES> by_class_;
};

}  // namespace dspine
