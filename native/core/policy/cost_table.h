// What one call costs by how many columns it computes. It is a staircase that depends on model, types, device and
// threads: nothing here assumes that it is smooth, linear or even rising.
#pragma once

#include <cstdint>
#include <vector>

namespace dspine {

struct CostPoint {
    int32_t n;  // columns: tokens of a decode, or blocks times draft length
    double us;
};

struct Costs {
    std::vector<CostPoint> verify;  // the target's decode by tokens
    std::vector<CostPoint> draft;   // the drafter by blocks times draft length
};

class CostTable {
  public:
    // Points in rising order of n. Throws std::invalid_argument for none, or for one that is not positive.
    explicit CostTable(const std::vector<CostPoint> & points);

    // Microseconds of a call with n columns. What was not measured lies on the line between its neighbours, and what is
    // hardly known costs no more than a larger call that is: rather try it than shun it.
    double at(int32_t n) const;
    // A call took so long. One outlier moves little: machines have other things to do.
    void observe(int32_t n, double us);

    std::vector<CostPoint> points() const;

  private:
    double interpolated(int32_t n) const;

    std::vector<CostPoint> points_;
    std::vector<double> n_calls_;  // that each of them stands for
    double scale_ = 1.0;           // of all points: load of the machine, and a growing context
};

}  // namespace dspine
