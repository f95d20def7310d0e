// How many tokens to draft, chosen every round from what was measured. Pure: it reads no clock, draws nothing at random
// and knows neither target nor drafter, so that recorded or made-up rounds can be replayed. Called by the engine.
#pragma once

#include <cstdint>
#include <vector>

#include "policy/calibration.h"
#include "policy/cost_table.h"
#include "policy/forecast.h"

namespace dspine {

// One sequence that may draft in this round.
struct DraftingSlot {
    Forecast * forecast;
    int32_t limit;                 // longest draft that it can use, at least 1
    std::vector<int32_t> lengths;  // that may be verified, in rising order; empty: all up to the limit
};

struct DraftPlan {
    int32_t n_draft = 0;  // tokens to draft per block; 0: none, plain decoding
    bool probe = false;   // not the best by what is known: tried to know more
    double rate = 0.0;    // emitted tokens per microsecond that the best plan promises
};

// A draft, and what became of it.
struct DraftOutcome {
    std::vector<float> probabilities;  // the drafter's, by token; NaN where it gives none
    int32_t n_agreed = 0;              // tokens at its beginning that equal those emitted
    bool ended = false;                // the next one is known to differ; else nothing is known of it
};

struct RoundCost {
    int32_t n_rows = 0;      // tokens of the target's decode
    int32_t n_columns = 0;   // blocks times draft length; 0 when nothing was drafted
    double verify_us = 0.0;  // 0: shared with prompts, and not comparable
    double draft_us = 0.0;
    double rest_us = 0.0;
    int32_t n_emitted = 0;
    std::vector<CostPoint> decodes;  // each, where every slot has its own; empty: the one of n_rows
};

// A slot's part in a round, as the policy was told.
struct SlotRecord {
    int64_t request = 0;
    int32_t limit = 0;
    std::vector<int32_t> lengths;  // as in DraftingSlot
    int32_t n_verified = 0;
    DraftOutcome outcome;  // without probabilities where nothing was drafted
};

// All that the policy was asked and told in one round: enough to replay it.
struct RoundRecord {
    DraftPlan plan;
    int32_t n_other = 0;
    std::vector<SlotRecord> slots;  // those of automatic length
    RoundCost cost;
};

class DraftLengthPolicy {
  public:
    // Costs measured at load: of the target's decode by tokens, of the drafter by blocks times draft length.
    // apart: every slot is verified in a decode of its own. Only then may `DraftingSlot::lengths` be restricted.
    DraftLengthPolicy(const std::vector<CostPoint> & verify, const std::vector<CostPoint> & draft, bool apart = false);

    // A forecast for a new request.
    static Forecast new_forecast();

    // The draft length that promises most emitted tokens per second for these slots and n_other further rows of the
    // same decode (sequences whose length is fixed).
    DraftPlan plan(const std::vector<DraftingSlot> & slots, int32_t n_other);
    // How many tokens of each draft are worth verifying, now that the drafter's probabilities are known.
    std::vector<int32_t> cut(const DraftPlan & plan, const std::vector<DraftingSlot> & slots,
                             const std::vector<std::vector<float>> & probabilities, int32_t n_other) const;

    void observe(Forecast & forecast, const DraftOutcome & outcome);
    void observe(const DraftPlan & plan, const RoundCost & cost);

    std::vector<CostPoint> verify_costs() const { return verify_.points(); }
    std::vector<CostPoint> draft_costs() const { return draft_.points(); }

  private:
    struct Choice {
        double tokens = 0.0;
        double us = 0.0;
        double rate() const { return tokens / us; }
    };
    struct Use {
        int64_t n = 0;
        int64_t last = 0;  // round
    };
    std::vector<double> conditional(const Forecast & forecast, const std::vector<float> & probabilities) const;
    std::vector<double> forecast(const DraftingSlot & slot, int32_t n_draft) const;
    Choice expect(const std::vector<DraftingSlot> & slots, int32_t n_draft, int32_t n_other) const;
    Choice expect_apart(const std::vector<DraftingSlot> & slots, int32_t n_draft, int32_t n_other) const;
    int32_t best_length(const DraftingSlot & slot, const std::vector<double> & conditional, double rate) const;

    CostTable verify_;
    CostTable draft_;
    bool apart_;
    double rest_us_[2] = {0.0, 0.0};  // of rounds without and with a draft
    Calibration calibration_;
    Forecast shared_;
    std::vector<Use> used_;  // by draft length
    int64_t n_rounds_ = 0;
    double credit_us_;  // time that probes may still cost
};

}  // namespace dspine
