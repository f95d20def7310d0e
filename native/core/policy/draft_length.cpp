#include "policy/draft_length.h"

#include <algorithm>
#include <cmath>

namespace dspine {
namespace {

constexpr double REQUEST_MEMORY = 30.0;  // drafts
constexpr double SHARED_MEMORY = 300.0;
constexpr double PROBE_SHARE = 0.005;  // of all time
constexpr int64_t PROBE_PAUSE = 24;    // rounds before the same length is probed again,
constexpr int64_t FIRST_PAUSE = 4;     // and while it was tried a few times only: costs at load may be wrong
constexpr int64_t FEW = 4;
constexpr double WORTH_PROBING = 0.4;  // of the best rate
constexpr double MARGIN = 1.02;        // by which drafting must promise more than plain decoding
constexpr double REST_RATE = 0.05;

double logistic(double x) {
    return 1.0 / (1.0 + std::exp(-x));
}

double shifted(double p, double shift) {
    const double inside = std::clamp(p, 1e-4, 1.0 - 1e-4);
    return logistic(std::log(inside / (1.0 - inside)) + shift);
}

// A drafted token that might be verified.
struct Candidate {
    double gain;  // probability that it is emitted
    size_t slot;
    int32_t position;
};

// All tokens of all drafts, the most promising first. Within a draft the order is that of its positions.
std::vector<Candidate> rank(const std::vector<std::vector<double>> & conditional) {
    std::vector<Candidate> all;
    for (size_t s = 0; s < conditional.size(); ++s) {
        double gain = 1.0;
        for (size_t j = 0; j < conditional[s].size(); ++j) {
            gain *= conditional[s][j];
            all.push_back({gain, s, static_cast<int32_t>(j)});
        }
    }
    std::stable_sort(all.begin(), all.end(), [](const Candidate & a, const Candidate & b) {
        return a.gain > b.gain || (a.gain == b.gain && a.position < b.position);
    });
    return all;
}

bool may_verify(const DraftingSlot & slot, int32_t n) {
    return slot.lengths.empty() || std::binary_search(slot.lengths.begin(), slot.lengths.end(), n);
}

// Whether some slot could verify a whole draft of this length.
bool is_useful(const std::vector<DraftingSlot> & slots, int32_t n) {
    return std::any_of(slots.begin(), slots.end(),
                       [&](const DraftingSlot & slot) { return n <= slot.limit && may_verify(slot, n); });
}

}  // namespace

DraftLengthPolicy::DraftLengthPolicy(const std::vector<CostPoint> & verify, const std::vector<CostPoint> & draft,
                                     bool apart)
    : verify_(verify),
      draft_(draft),
      apart_(apart),
      shared_(SHARED_MEMORY),
      credit_us_(2.0 * verify_.at(1) + draft_.at(1)) {}

Forecast DraftLengthPolicy::new_forecast() {
    return Forecast(REQUEST_MEMORY);
}

std::vector<double> DraftLengthPolicy::conditional(const Forecast & forecast,
                                                   const std::vector<float> & probabilities) const {
    std::vector<double> out(probabilities.size());
    for (size_t j = 0; j < out.size(); ++j) {
        out[j] = shifted(calibration_.at(static_cast<int32_t>(j), probabilities[j]), forecast.shift());
    }
    return out;
}

// How likely each token of such a draft is accepted given that all before it are.
std::vector<double> DraftLengthPolicy::forecast(const DraftingSlot & slot, int32_t n_draft) const {
    std::vector<double> conditional;
    for (int32_t j = 0; j < std::min(n_draft, slot.limit); ++j) {
        conditional.push_back(slot.forecast->at(j, &shared_));
    }
    return conditional;
}

// Of a slot with a decode of its own: the tokens whose gain is worth most more than their time brings elsewhere.
int32_t DraftLengthPolicy::best_length(const DraftingSlot & slot, const std::vector<double> & conditional,
                                       double rate) const {
    int32_t best = 0;
    double best_value = -rate * verify_.at(1);
    double reach = 1.0;
    double gain = 0.0;
    for (size_t j = 0; j < conditional.size(); ++j) {
        reach *= conditional[j];
        gain += reach;
        const int32_t n = static_cast<int32_t>(j) + 1;
        const double value = gain - rate * verify_.at(1 + n);
        if (value > best_value && may_verify(slot, n)) {
            best_value = value;
            best = n;
        }
    }
    return best;
}

// Likewise for slots with a decode each. What pays for one depends on the rate that all reach together, and that on
// what each does: begin with all that may be verified, and repeat while the rate rises.
DraftLengthPolicy::Choice DraftLengthPolicy::expect_apart(const std::vector<DraftingSlot> & slots, int32_t n_draft,
                                                          int32_t n_other) const {
    const double n_slots = static_cast<double>(slots.size());
    const Choice plain = {n_slots, n_slots * verify_.at(1) + verify_.at(n_other) + rest_us_[0]};
    if (n_draft == 0) {
        return plain;
    }
    Choice best;
    double rate = 0.0;
    for (;;) {
        Choice choice = {n_slots, verify_.at(n_other) + rest_us_[1]};
        int32_t n_blocks = 0;
        for (const DraftingSlot & slot : slots) {
            const std::vector<double> conditional = forecast(slot, n_draft);
            const int32_t n = best_length(slot, conditional, rate);
            double reach = 1.0;
            for (int32_t j = 0; j < n; ++j) {
                reach *= conditional[static_cast<size_t>(j)];
                choice.tokens += reach;
            }
            choice.us += verify_.at(1 + n);
            n_blocks += n > 0 ? 1 : 0;
        }
        choice.us += draft_.at(std::max(1, n_blocks) * n_draft);
        if (best.us > 0.0 && choice.rate() <= best.rate()) {
            return best;
        }
        best = choice;
        rate = choice.rate();
    }
}

// The best that can be had from drafts of n_draft tokens, of which as many are verified as pays.
DraftLengthPolicy::Choice DraftLengthPolicy::expect(const std::vector<DraftingSlot> & slots, int32_t n_draft,
                                                    int32_t n_other) const {
    if (apart_) {
        return expect_apart(slots, n_draft, n_other);
    }
    const int32_t n_slots = static_cast<int32_t>(slots.size());
    const Choice plain = {static_cast<double>(n_slots), verify_.at(n_slots + n_other) + rest_us_[0]};
    if (n_draft == 0) {
        return plain;
    }
    std::vector<std::vector<double>> drafts;
    for (const DraftingSlot & slot : slots) {
        drafts.push_back(forecast(slot, n_draft));
    }
    Choice best;
    std::vector<bool> drafting(slots.size(), false);
    int32_t n_blocks = 0;
    int32_t n_tokens = 0;
    double gain = 0.0;
    for (const Candidate & candidate : rank(drafts)) {
        n_blocks += drafting[candidate.slot] ? 0 : 1;
        drafting[candidate.slot] = true;
        gain += candidate.gain;
        ++n_tokens;
        const Choice choice = {n_slots + gain,
                               draft_.at(n_blocks * n_draft) + verify_.at(n_slots + n_other + n_tokens) + rest_us_[1]};
        if (best.us == 0.0 || choice.rate() > best.rate()) {
            best = choice;
        }
    }
    return best;
}

DraftPlan DraftLengthPolicy::plan(const std::vector<DraftingSlot> & slots, int32_t n_other) {
    DraftPlan plan;
    int32_t longest = 0;
    for (const DraftingSlot & slot : slots) {
        longest = std::max(longest, slot.limit);
    }
    if (longest == 0) {
        return plan;
    }
    used_.resize(std::max(used_.size(), static_cast<size_t>(longest) + 1));
    std::vector<Choice> choices;
    for (int32_t k = 0; k <= longest; ++k) {
        choices.push_back(expect(slots, k, n_other));
    }
    plan.rate = choices[0].rate();
    for (int32_t k = 1; k <= longest; ++k) {
        if (!is_useful(slots, k)) {
            continue;
        }
        const double rate = choices[static_cast<size_t>(k)].rate();
        if (rate > plan.rate * (plan.n_draft == 0 ? MARGIN : 1.0)) {
            plan.rate = rate;
            plan.n_draft = k;
        }
    }
    // A length that is almost as good, or was never tried, may have become the best: look at the most promising one.
    int32_t probed = -1;
    for (int32_t k = 0; k <= longest; ++k) {
        const Choice & choice = choices[static_cast<size_t>(k)];
        const double loss_us = choice.us - choice.tokens / plan.rate;
        const Use & use = used_[static_cast<size_t>(k)];
        if (k != plan.n_draft && (k == 0 || is_useful(slots, k)) &&
            n_rounds_ - use.last >= (use.n < FEW ? FIRST_PAUSE : PROBE_PAUSE) && loss_us <= credit_us_ &&
            choice.rate() > WORTH_PROBING * plan.rate &&
            (probed < 0 || choice.rate() > choices[static_cast<size_t>(probed)].rate())) {
            probed = k;
        }
    }
    if (probed >= 0) {
        plan.probe = true;
        plan.n_draft = probed;
    }
    used_[static_cast<size_t>(plan.n_draft)].last = n_rounds_;
    ++used_[static_cast<size_t>(plan.n_draft)].n;
    if (plan.n_draft == 0) {
        for (const DraftingSlot & slot : slots) {
            slot.forecast->forget();
        }
    }
    return plan;
}

std::vector<int32_t> DraftLengthPolicy::cut(const DraftPlan & plan, const std::vector<DraftingSlot> & slots,
                                            const std::vector<std::vector<float>> & probabilities,
                                            int32_t n_other) const {
    std::vector<std::vector<double>> drafts;
    for (size_t s = 0; s < slots.size(); ++s) {
        std::vector<float> usable = probabilities[s];
        usable.resize(std::min(usable.size(), static_cast<size_t>(slots[s].limit)));
        drafts.push_back(conditional(*slots[s].forecast, usable));
    }
    std::vector<int32_t> lengths(slots.size(), 0);
    if (apart_) {
        for (size_t s = 0; s < slots.size(); ++s) {
            lengths[s] = best_length(slots[s], drafts[s], plan.rate);
        }
        return lengths;
    }
    // The draft is paid for. A token more is worth its time if it brings more than that time would elsewhere.
    const int32_t n_plain = static_cast<int32_t>(slots.size()) + n_other;
    const std::vector<Candidate> ranked = rank(drafts);
    double gain = 0.0;
    double best_value = -plan.rate * verify_.at(n_plain);
    size_t n_best = 0;
    for (size_t n = 1; n <= ranked.size(); ++n) {
        gain += ranked[n - 1].gain;
        const double value = gain - plan.rate * verify_.at(n_plain + static_cast<int32_t>(n));
        if (value > best_value) {
            best_value = value;
            n_best = n;
        }
    }
    for (size_t n = 0; n < n_best; ++n) {
        ++lengths[ranked[n].slot];
    }
    return lengths;
}

void DraftLengthPolicy::observe(Forecast & forecast, const DraftOutcome & outcome) {
    const std::vector<double> expected = conditional(forecast, outcome.probabilities);
    forecast.observe(expected);
    shared_.observe(expected);
    const size_t n_known = std::min(expected.size(), static_cast<size_t>(outcome.n_agreed) + (outcome.ended ? 1 : 0));
    for (size_t j = 0; j < n_known; ++j) {
        const bool accepted = j < static_cast<size_t>(outcome.n_agreed);
        forecast.correct((accepted ? 1.0 : 0.0) - expected[j]);
        calibration_.observe(static_cast<int32_t>(j), outcome.probabilities[j], accepted);
    }
}

void DraftLengthPolicy::observe(const DraftPlan & plan, const RoundCost & cost) {
    ++n_rounds_;
    if (cost.n_columns > 0) {
        draft_.observe(cost.n_columns, cost.draft_us);
    }
    for (const CostPoint & decode : cost.decodes) {
        verify_.observe(decode.n, decode.us);
    }
    if (cost.decodes.empty() && cost.verify_us > 0.0) {
        verify_.observe(cost.n_rows, cost.verify_us);
    }
    double & rest = rest_us_[cost.n_columns > 0 ? 1 : 0];
    rest = rest == 0.0 ? cost.rest_us : rest + REST_RATE * (std::min(cost.rest_us, 2.0 * rest) - rest);
    if (plan.rate <= 0.0) {
        return;  // nothing was planned: all lengths were fixed
    }
    const double us = cost.draft_us + cost.verify_us + cost.rest_us;
    credit_us_ += PROBE_SHARE * us;
    if (plan.probe) {
        credit_us_ -= us - cost.n_emitted / plan.rate;
    }
    credit_us_ = std::min(credit_us_, 4.0 * verify_.at(1) + draft_.at(1));
}

}  // namespace dspine
