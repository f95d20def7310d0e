// One round of the engine: draft, verify in one decode, accept, cut back, commit.
#include <algorithm>

#include "base/errors.h"
#include "engine/engine.h"

namespace dspine {

// Never more than can be emitted: the round adds one token beyond the draft.
int32_t Engine::draft_limit(const Slot & slot) const {
    if (!keeps_drafter(slot)) {
        return 0;
    }
    int32_t room = target_->n_ctx_seq() - static_cast<int32_t>(slot.tokens.size()) - 1;
    if (slot.job->request.max_tokens >= 0) {
        room = std::min(room, slot.job->request.max_tokens - slot.job->stats.n_generated - 1);
    }
    return std::clamp(slot.n_draft, 0, std::max(0, room));
}

void Engine::draft_blocks() {
    std::vector<BlockRequest> blocks;
    std::vector<Slot *> drafting;
    int32_t n_longest = 0;
    for (int32_t i = 0; i < n_slots(); ++i) {
        Slot & slot = slots_[static_cast<size_t>(i)];
        slot.draft.clear();
        const int32_t limit = slot.job && slot.generating ? draft_limit(slot) : 0;
        if (limit > 0) {
            blocks.push_back({i, slot.tokens.back(), &slot.tokens});
            drafting.push_back(&slot);
            n_longest = std::max(n_longest, limit);
        }
    }
    if (blocks.empty()) {
        return;
    }
    // Blocks of one call have one length. Cutting a draft short leaves its beginning as it is.
    std::vector<Draft> drafts;
    try {
        drafts = drafter_->draft(blocks, n_longest);
        if (drafts.size() != blocks.size()) {
            throw BackendError("the drafter gave " + std::to_string(drafts.size()) + " drafts for " +
                               std::to_string(blocks.size()) + " blocks");
        }
    } catch (const std::exception & e) {  // concerns those that draft, and no one else
        for (Slot * slot : drafting) {
            fail(*slot, e.what());
        }
        return;
    }
    for (size_t b = 0; b < blocks.size(); ++b) {
        std::vector<int32_t> & tokens = drafts[b].tokens;
        tokens.resize(std::min(tokens.size(), static_cast<size_t>(draft_limit(*drafting[b]))));
        const auto outside = std::find_if(tokens.begin(), tokens.end(),
                                          [&](int32_t token) { return token < 0 || token >= target_->n_vocab(); });
        if (outside != tokens.end()) {
            fail(*drafting[b], "the drafter's token " + std::to_string(*outside) + " is outside the vocabulary of " +
                                   std::to_string(target_->n_vocab()));
            continue;
        }
        drafting[b]->draft = std::move(tokens);
    }
}

// Ends the slot's request; what the failing round emitted is taken back.
void Engine::fail(Slot & slot, const std::string & why) {
    slot.job->stats.n_generated -= static_cast<int32_t>(slot.emitted.size());
    slot.emitted.clear();
    slot.logprobs.clear();
    slot.finish = Finish::error;
    slot.error = why;
}

std::vector<BatchToken> Engine::plan_batch() {
    std::vector<BatchToken> batch;
    const auto begin = [&](Slot & slot, int32_t seq) {
        slot.row = static_cast<int32_t>(batch.size());
        slot.n_before = target_->length(seq);
    };
    for (int32_t i = 0; i < n_slots(); ++i) {
        Slot & slot = slots_[static_cast<size_t>(i)];
        if (!slot.job || !slot.generating || slot.finish != Finish::none) {
            continue;
        }
        begin(slot, i);
        batch.push_back({slot.tokens.back(), slot.n_before, i, true});
        for (const int32_t token : slot.draft) {
            batch.push_back({token, slot.n_before + static_cast<int32_t>(batch.size()) - slot.row, i, true});
        }
        slot.n_rows = static_cast<int32_t>(batch.size()) - slot.row;
    }
    // Prompts share what is left of the batch.
    for (int32_t i = 0; i < n_slots(); ++i) {
        Slot & slot = slots_[static_cast<size_t>(i)];
        const int32_t room = target_->n_batch() - static_cast<int32_t>(batch.size());
        if (!slot.job || slot.generating || slot.finish != Finish::none || room <= 0) {
            continue;
        }
        begin(slot, i);
        const int32_t n_prompt = static_cast<int32_t>(slot.tokens.size());
        slot.n_rows = std::min(room, n_prompt - slot.n_before);
        for (int32_t pos = slot.n_before; pos < slot.n_before + slot.n_rows; ++pos) {
            batch.push_back({slot.tokens[static_cast<size_t>(pos)], pos, i, pos + 1 == n_prompt});
        }
    }
    return batch;
}

// Samples row after row while the draft agrees. Emitted: the accepted drafts and one token more.
void Engine::accept(Slot & slot) {
    Job & job = *slot.job;
    slot.n_kept = slot.n_rows;
    if (!slot.generating && slot.n_before + slot.n_rows < static_cast<int32_t>(slot.tokens.size())) {
        return;  // more of the prompt to read
    }
    const int32_t first = slot.row + (slot.generating ? 0 : slot.n_rows - 1);
    const std::vector<int32_t> & stops = job.request.stop_tokens;
    const int32_t limit = job.request.max_tokens < 0 ? INT32_MAX : job.request.max_tokens;
    size_t n_accepted = 0;
    while (job.stats.n_generated < limit) {
        const float * logits = target_->logits(first + static_cast<int32_t>(n_accepted));
        const int32_t token = job.sampler->sample(logits);
        if (job.request.n_probs >= 0) {
            slot.logprobs.push_back(token_logprobs(logits, target_->n_vocab(), token, job.request.n_probs));
        }
        slot.emitted.push_back(token);
        slot.tokens.push_back(token);
        ++job.stats.n_generated;
        if (llama_vocab_is_eog(target_->vocab(), token) ||
            std::find(stops.begin(), stops.end(), token) != stops.end()) {
            slot.finish = Finish::stop;
        } else if (job.stats.n_generated >= limit || slot.tokens.size() >= static_cast<size_t>(target_->n_ctx_seq())) {
            slot.finish = Finish::length;
        }
        if (slot.finish != Finish::none || n_accepted >= slot.draft.size() || token != slot.draft[n_accepted]) {
            break;
        }
        ++n_accepted;
    }
    if (limit == 0) {
        slot.finish = Finish::length;
    }
    if (slot.generating) {
        slot.n_kept = static_cast<int32_t>(slot.emitted.size());
    }
}

void Engine::cut_and_commit(RoundTimes & times) {
    std::vector<FeatureRows> rows;
    for (int32_t i = 0; i < n_slots(); ++i) {
        Slot & slot = slots_[static_cast<size_t>(i)];
        if (slot.row < 0) {
            continue;
        }
        if (slot.finish == Finish::error) {
            rewind(slot, i);
            continue;
        }
        target_->truncate(i, slot.n_before + slot.n_kept);
        if (!keeps_drafter(slot)) {
            continue;
        }
        const size_t n_embd = static_cast<size_t>(target_->tensors()->n_embd);
        FeatureRows part = {i, slot.n_kept, {}, n_embd};
        for (size_t t = 0; t < drafter_->taps().size(); ++t) {
            part.taps.push_back(target_->taps(t) + static_cast<size_t>(slot.row) * n_embd);
        }
        rows.push_back(std::move(part));
    }
    times.accepted = ggml_time_us();
    if (!rows.empty()) {
        drafter_->commit(rows);
    }
    times.committed = ggml_time_us();
    for (int32_t i = 0; i < n_slots(); ++i) {
        const Slot & slot = slots_[static_cast<size_t>(i)];
        if (slot.row >= 0 && keeps_drafter(slot) && drafter_->length(i) != target_->length(i)) {
            throw BackendError("the drafter has " + std::to_string(drafter_->length(i)) +
                               " committed positions, the target " + std::to_string(target_->length(i)));
        }
    }
}

// Back to the state before the round, or to nothing where a cache cannot go back that far.
void Engine::rewind(Slot & slot, int32_t index) {
    const int32_t n = slot.n_before;
    try {
        if (target_->reusable(index, n) == n && (!keeps_drafter(slot) || drafter_->reusable(index, n) == n)) {
            target_->truncate(index, n);
            if (drafter_) {
                drafter_->truncate(index, std::min(n, drafter_->length(index)));
            }
            return;
        }
    } catch (const std::exception & e) {
        slot.error += std::string("; then: ") + e.what();
    }
    forget(slot, index);
}

// Empties both caches of the slot. Its request has failed already: what fails here is added to the reason.
void Engine::forget(Slot & slot, int32_t index) {
    try {
        target_->clear(index);
        if (drafter_) {
            drafter_->truncate(index, 0);
        }
    } catch (const std::exception & e) {
        slot.error += std::string("; then: ") + e.what();
    }
}

void Engine::account(Slot & slot, const RoundTimes & times) {
    RequestStats & stats = slot.job->stats;
    if (!slot.generating) {
        stats.prefill_us += times.committed - times.start;
        slot.generating = !slot.emitted.empty();
        return;
    }
    ++stats.n_rounds;
    stats.draft_us += times.drafted - times.start;
    stats.verify_us += times.decoded - times.drafted;
    stats.commit_us += times.committed - times.accepted;
    stats.round_us += times.committed - times.start;
    const size_t n_accepted = slot.emitted.empty() ? 0 : slot.emitted.size() - 1;
    stats.n_drafted += static_cast<int32_t>(slot.draft.size());
    stats.n_accepted += static_cast<int32_t>(n_accepted);
    stats.drafted_at.resize(std::max(stats.drafted_at.size(), slot.draft.size()), 0);
    stats.accepted_at.resize(stats.drafted_at.size(), 0);
    for (size_t i = 0; i < slot.draft.size(); ++i) {
        ++stats.drafted_at[i];
        stats.accepted_at[i] += i < n_accepted ? 1 : 0;
    }
}

void Engine::run_round() {
    for (int32_t i = 0; i < n_slots(); ++i) {
        Slot & slot = slots_[static_cast<size_t>(i)];
        slot.row = -1;
        slot.n_rows = slot.n_kept = 0;
        slot.emitted.clear();
        slot.logprobs.clear();
        slot.n_before = target_->length(i);
    }
    RoundTimes times = {};
    try {
        times.start = ggml_time_us();
        draft_blocks();
        const std::vector<BatchToken> batch = plan_batch();
        if (batch.empty()) {
            return;
        }
        times.drafted = ggml_time_us();
        target_->decode(batch);
        times.decoded = ggml_time_us();
        for (Slot & slot : slots_) {
            if (slot.row < 0) {
                continue;
            }
            try {
                accept(slot);
            } catch (const std::exception & e) {  // a sampler's failure concerns its own request only
                fail(slot, e.what());
            }
        }
        cut_and_commit(times);
    } catch (const std::exception & e) {
        for (int32_t i = 0; i < n_slots(); ++i) {
            Slot & slot = slots_[static_cast<size_t>(i)];
            if (slot.row >= 0) {
                fail(slot, e.what());
                rewind(slot, i);
            }
        }
        return;
    }
    for (Slot & slot : slots_) {
        if (slot.row >= 0 && slot.finish != Finish::error) {
            account(slot, times);
        }
    }
}

}  // namespace dspine
