// The drafting half of a round: how long the drafts are, and the one call that makes them.
#include <algorithm>
#include <cmath>

#include "base/errors.h"
#include "engine/engine.h"

namespace dspine {

// Never more than can be emitted: the round adds one token beyond the draft. Strict: nor more than is exact there.
void Engine::limit_draft(Slot & slot, int32_t index) const {
    slot.limit = 0;
    slot.lengths.clear();
    if (!slot.job || !slot.generating || !keeps_drafter(slot)) {
        return;
    }
    int32_t room = target_->n_ctx_seq() - static_cast<int32_t>(slot.tokens.size()) - 1;
    if (slot.job->request.max_tokens >= 0) {
        room = std::min(room, slot.job->request.max_tokens - slot.job->stats.n_generated - 1);
    }
    slot.limit = std::clamp(room, 0, slot.n_draft == AUTO_DRAFT ? n_draft_max_ : slot.n_draft);
    if (options_.exact) {
        slot.lengths = options_.exact->at(target_->length(index), slot.limit);
        slot.limit = longest_of(slot.lengths, slot.limit);
    }
}

// Decides who drafts and how much. Slots of automatic length are planned together, the others as they were told.
Engine::DraftRound Engine::plan_drafts() {
    DraftRound round;
    std::vector<DraftingSlot> planned;
    for (int32_t i = 0; i < n_slots(); ++i) {
        Slot & slot = slots_[static_cast<size_t>(i)];
        slot.draft.clear();
        slot.probabilities.clear();
        slot.n_unverified = 0;
        limit_draft(slot, i);
        const int32_t limit = slot.limit;
        if (slot.job && slot.generating && (slot.n_draft != AUTO_DRAFT || limit == 0)) {
            round.n_other += 1 + (slot.n_draft == AUTO_DRAFT ? 0 : limit);
        }
        if (limit > 0 && slot.n_draft == AUTO_DRAFT) {
            round.automatic.push_back(i);
            planned.push_back({&slot.job->forecast, limit, slot.lengths});
        } else if (limit > 0) {
            round.drafting.push_back(i);
            round.n_longest = std::max(round.n_longest, limit);
        }
    }
    if (!planned.empty()) {
        round.plan = policy_->plan(planned, round.n_other);
        if (round.plan.n_draft > 0) {
            round.drafting.insert(round.drafting.end(), round.automatic.begin(), round.automatic.end());
            round.n_longest = std::max(round.n_longest, round.plan.n_draft);
        }
    }
    return round;
}

void Engine::draft_blocks(DraftRound & round) {
    if (round.drafting.empty()) {
        return;
    }
    // Blocks of one call have one length. Cutting a draft short leaves its beginning as it is.
    std::vector<BlockRequest> blocks;
    std::vector<Draft> drafts;
    try {
        flush_features(round.drafting);
        for (const int32_t i : round.drafting) {
            const Slot & slot = slots_[static_cast<size_t>(i)];
            blocks.push_back({i, slot.tokens.back(), &slot.tokens});
        }
        drafts = drafter_->draft(blocks, round.n_longest);
        if (drafts.size() != blocks.size()) {
            throw BackendError("the drafter gave " + std::to_string(drafts.size()) + " drafts for " +
                               std::to_string(blocks.size()) + " blocks");
        }
    } catch (const std::exception & e) {  // concerns those that draft, and no one else
        for (const int32_t i : round.drafting) {
            fail(slots_[static_cast<size_t>(i)], e.what());
        }
        return;
    }
    round.n_columns = static_cast<int32_t>(blocks.size()) * round.n_longest;
    for (size_t b = 0; b < blocks.size(); ++b) {
        Slot & slot = slots_[static_cast<size_t>(round.drafting[b])];
        std::vector<int32_t> & tokens = drafts[b].tokens;
        const int32_t wanted = slot.n_draft == AUTO_DRAFT ? std::min(slot.limit, round.plan.n_draft) : slot.limit;
        tokens.resize(std::min(tokens.size(), static_cast<size_t>(wanted)));
        const auto outside = std::find_if(tokens.begin(), tokens.end(),
                                          [&](int32_t token) { return token < 0 || token >= target_->n_vocab(); });
        if (outside != tokens.end()) {
            fail(slot, "the drafter's token " + std::to_string(*outside) + " is outside the vocabulary of " +
                           std::to_string(target_->n_vocab()));
            continue;
        }
        slot.draft = std::move(tokens);
        slot.probabilities = std::move(drafts[b].probabilities);
        slot.probabilities.resize(slot.draft.size(), std::nanf(""));
        if (options_.exact) {  // a drafter may give less than it was asked for
            const int32_t n = static_cast<int32_t>(slot.draft.size());
            slot.n_unverified = n - longest_of(slot.lengths, n);
        }
    }
    cut_drafts(round);
}

// What the drafter thinks of its tokens says how many are worth a row of the target's decode.
void Engine::cut_drafts(const DraftRound & round) {
    if (round.plan.n_draft == 0) {
        return;
    }
    std::vector<Slot *> drafted;
    std::vector<DraftingSlot> planned;
    std::vector<std::vector<float>> probabilities;
    for (const int32_t i : round.automatic) {
        Slot & slot = slots_[static_cast<size_t>(i)];
        if (slot.finish == Finish::none) {
            drafted.push_back(&slot);
            planned.push_back({&slot.job->forecast, slot.limit, slot.lengths});
            probabilities.push_back(slot.probabilities);
        }
    }
    const std::vector<int32_t> lengths = policy_->cut(round.plan, planned, probabilities, round.n_other);
    for (size_t b = 0; b < drafted.size(); ++b) {
        drafted[b]->n_unverified = static_cast<int32_t>(drafted[b]->draft.size()) - lengths[b];
    }
}

// The policy learns from every draft, also from those of fixed length, and from tokens that were drafted and then
// turned up without having been verified.
void Engine::learn(const DraftRound & round, const RoundTimes & times, bool has_prompts) {
    if (!policy_) {
        return;
    }
    RoundRecord record = {round.plan, round.n_other, {}, {}};
    RoundCost cost;
    for (Slot & slot : slots_) {
        if (slot.row < 0 || slot.finish == Finish::error || slot.emitted.empty() || !slot.was_generating) {
            continue;
        }
        cost.n_rows += slot.n_rows;
        cost.n_emitted += static_cast<int32_t>(slot.emitted.size());
        DraftOutcome outcome;
        if (!slot.draft.empty()) {
            const auto pair =
                std::mismatch(slot.draft.begin(), slot.draft.end(), slot.emitted.begin(), slot.emitted.end());
            outcome.n_agreed = static_cast<int32_t>(pair.first - slot.draft.begin());
            outcome.ended = pair.first != slot.draft.end() && pair.second != slot.emitted.end();
            outcome.probabilities = slot.probabilities;
            policy_->observe(slot.job->forecast, outcome);
        }
        if (n_records_ > 0 && slot.n_draft == AUTO_DRAFT) {
            record.slots.push_back({slot.job->id, slot.limit, slot.lengths, slot.n_verified(), std::move(outcome)});
        }
    }
    if (!has_prompts && cost.n_rows > 0) {  // else what prompts cost is not known apart
        cost.n_columns = round.n_columns;
        cost.draft_us = static_cast<double>(times.draft);
        cost.verify_us = static_cast<double>(times.verify);
        cost.rest_us = static_cast<double>(times.whole - times.draft - times.verify);
        if (options_.exact) {
            cost.decodes = times.decodes;
        }
        if (round.n_columns == 0) {  // planning, and nothing else
            cost.rest_us += cost.draft_us;
            cost.draft_us = 0.0;
        }
        policy_->observe(round.plan, cost);
        record.cost = cost;
    }
    if (!record.slots.empty()) {
        if (records_.size() == n_records_) {
            records_.pop_front();
        }
        records_.push_back(std::move(record));
    }
}

void Engine::record_rounds(size_t n) {
    const std::lock_guard<std::mutex> lock(step_mutex_);
    n_records_ = n;
    while (records_.size() > n) {
        records_.pop_front();
    }
}

std::vector<RoundRecord> Engine::take_rounds() {
    const std::lock_guard<std::mutex> lock(step_mutex_);
    std::vector<RoundRecord> taken(std::make_move_iterator(records_.begin()), std::make_move_iterator(records_.end()));
    records_.clear();
    return taken;
}

}  // namespace dspine
