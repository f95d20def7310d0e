// What the next draft of a request is worth before it is drafted: how likely each of its positions is reached and
// accepted. A request begins with what all requests showed.
#pragma once

#include <cstdint>
#include <vector>

namespace dspine {

class Forecast {
  public:
    // memory: drafts that are remembered.
    explicit Forecast(double memory);

    // The probability that a position is accepted given that all before it are; `prior` answers for what is not known.
    double at(int32_t position, const Forecast * prior) const;
    // A draft whose tokens were given these probabilities, each given that all before it are accepted.
    void observe(const std::vector<double> & conditional);

    // A round without a draft: what was known of this request counts less against what is known of all. Else one that
    // drafts badly for a moment would never draft again.
    void forget();

    // Log-odds by which this request is accepted more often than the calibration says.
    double shift() const { return shift_; }
    void correct(double surprise);  // accepted (1 or 0) minus the probability that was expected

  private:
    double keep_;
    double shift_ = 0.0;
    std::vector<double> reached_;   // by position, sums of the probability that the draft got there,
    std::vector<double> accepted_;  // and that it got beyond
};

}  // namespace dspine
