// Times target and drafter at load, so that the first draft lengths are chosen well. Called before an engine is made.
#pragma once

#include <functional>
#include <vector>

#include "drafter/draft_source.h"
#include "policy/cost_table.h"
#include "target/target.h"

namespace dspine {

// Tells that `n_done` of `n_all` calls are timed.
using SweepProgress = std::function<void(int32_t n_done, int32_t n_all)>;

// Both must be idle; their caches are emptied. Every length is timed until budget_us is spent, the most telling ones
// first: where a call takes long, only a few are. The best of up to three passes counts.
Costs measure_costs(Target & target, DraftSource & drafter, double budget_us, const SweepProgress & progress);

}  // namespace dspine
