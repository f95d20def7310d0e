// One round of the engine: draft (engine_draft.cpp), verify in one decode, accept, cut back, commit.
#include <algorithm>

#include "base/errors.h"
#include "engine/engine.h"

namespace dspine {
namespace {

// Rows that may wait for the drafter: few enough that reading them takes no longer than a draft.
constexpr int32_t MAX_BACKLOG = 64;

}  // namespace

// Ends the slot's request; what the failing round emitted is taken back.
void Engine::fail(Slot & slot, const std::string & why) {
    slot.job->stats.n_generated -= static_cast<int32_t>(slot.emitted.size());
    slot.emitted.clear();
    slot.logprobs.clear();
    slot.finish = Finish::error;
    slot.error = why;
}

std::vector<BatchToken> Engine::plan_batch(const std::vector<int32_t> & indices) {
    std::vector<BatchToken> batch;
    const auto begin = [&](Slot & slot, int32_t seq) {
        slot.row = static_cast<int32_t>(batch.size());
        slot.n_before = target_->length(seq);
    };
    for (const int32_t i : indices) {
        Slot & slot = slots_[static_cast<size_t>(i)];
        if (!slot.job || !slot.generating || slot.finish != Finish::none) {
            continue;
        }
        begin(slot, i);
        batch.push_back({slot.tokens.back(), slot.n_before, i, true});
        for (int32_t d = 0; d < slot.n_verified(); ++d) {
            batch.push_back({slot.draft[static_cast<size_t>(d)], slot.n_before + 1 + d, i, true});
        }
        slot.n_rows = static_cast<int32_t>(batch.size()) - slot.row;
    }
    // Prompts share what is left of the batch.
    for (const int32_t i : indices) {
        Slot & slot = slots_[static_cast<size_t>(i)];
        const int32_t room = target_->n_batch() - static_cast<int32_t>(batch.size());
        if (!slot.job || slot.generating || slot.finish != Finish::none || room <= 0) {
            continue;
        }
        begin(slot, i);
        const int32_t n_prompt = static_cast<int32_t>(slot.tokens.size());
        const int32_t stop = prompt_stop(i);
        slot.n_rows = std::min(room, stop - slot.n_before);
        slot.at_checkpoint = slot.n_before + slot.n_rows == stop && stop < n_prompt;
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
        int32_t token = job.sampler->sample(logits);
        const auto i_token = static_cast<size_t>(job.stats.n_generated);
        if (i_token < job.request.replay.size() && token != job.request.replay[i_token]) {
            token = job.request.replay[i_token];
            ++n_replaced_;
        }
        if (job.request.n_probs >= 0) {
            slot.logprobs.push_back(job.request.post_sampling
                                        ? job.sampler->sampled_logprobs(job.request.n_probs)
                                        : token_logprobs(logits, target_->n_vocab(), token, job.request.n_probs));
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
        if (slot.finish != Finish::none || n_accepted >= static_cast<size_t>(slot.n_verified()) ||
            token != slot.draft[n_accepted]) {
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

void Engine::cut_and_commit(const std::vector<int32_t> & indices, RoundTimes & times) {
    std::vector<FeatureRows> rows;
    std::vector<int32_t> late;  // slots whose backlog comes first
    for (const int32_t i : indices) {
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
        // The next draft is likely to follow one, and a prompt is better read in large parts.
        if (slot.draft.empty() && slot.generating && slot.backlog.size() + part.n <= MAX_BACKLOG) {
            slot.backlog.append(part, n_embd);
            continue;
        }
        late.push_back(i);
        rows.push_back(std::move(part));
    }
    const int64_t start = ggml_time_us();
    flush_features(late);
    if (!rows.empty()) {
        drafter_->commit(rows);
    }
    times.commit += ggml_time_us() - start;
    for (const int32_t i : indices) {
        const Slot & slot = slots_[static_cast<size_t>(i)];
        if (slot.row >= 0 && keeps_drafter(slot) && drafter_length(i) != target_->length(i)) {
            throw BackendError("the drafter has " + std::to_string(drafter_length(i)) +
                               " committed positions, the target " + std::to_string(target_->length(i)));
        }
    }
}

// Back to the state before the round, or to nothing where a cache cannot go back that far.
void Engine::rewind(Slot & slot, int32_t index) {
    const int32_t n = slot.n_before;
    try {
        // What waits in the backlog was committed before the round, and stays.
        const int32_t n_drafter = drafter_ ? std::min(n, drafter_->length(index)) : 0;
        if (target_->reusable(index, n) == n &&
            (!keeps_drafter(slot) || drafter_->reusable(index, n_drafter) == n_drafter)) {
            target_->truncate(index, n);
            if (drafter_) {
                drafter_->truncate(index, n_drafter);
            }
            return;
        }
    } catch (const std::exception & e) {
        slot.error += std::string("; then: ") + e.what();
    }
    forget(slot, index);
}

// Gives the drafter what waits.
void Engine::flush_features(const std::vector<int32_t> & indices) {
    const auto width = static_cast<size_t>(target_->tensors()->n_embd);
    for (const int32_t i : indices) {
        Slot & slot = slots_[static_cast<size_t>(i)];
        if (slot.backlog.size() > 0) {
            drafter_->commit({slot.backlog.rows(i, width)});
            slot.backlog.clear();  // before the next slot's may fail
        }
    }
}

// Empties both caches of the slot. Its request has failed already: what fails here is added to the reason.
void Engine::forget(Slot & slot, int32_t index) {
    try {
        target_->clear(index);
        checkpoints_.cut(index, 0);
        slot.backlog.clear();
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
        stats.prefill_us += times.whole;
        slot.generating = !slot.emitted.empty();
        return;
    }
    ++stats.n_rounds;
    stats.draft_us += times.draft;
    stats.verify_us += times.verify;
    stats.commit_us += times.commit;
    stats.round_us += times.whole;
    const size_t n_accepted = slot.emitted.empty() ? 0 : slot.emitted.size() - 1;
    const size_t n_verified = static_cast<size_t>(slot.n_verified());
    stats.n_drafted += slot.n_verified();
    stats.n_accepted += static_cast<int32_t>(n_accepted);
    stats.rounds_by_draft.resize(std::max(stats.rounds_by_draft.size(), n_verified + 1), 0);
    ++stats.rounds_by_draft[n_verified];
    stats.drafted_at.resize(std::max(stats.drafted_at.size(), n_verified), 0);
    stats.accepted_at.resize(stats.drafted_at.size(), 0);
    for (size_t i = 0; i < n_verified; ++i) {
        ++stats.drafted_at[i];
        stats.accepted_at[i] += i < n_accepted ? 1 : 0;
    }
}

// The slots of each decode: all together, or, strict, every one alone. Its prompts are then read as if it were the only
// one, too.
std::vector<std::vector<int32_t>> Engine::decodes() const {
    std::vector<std::vector<int32_t>> all;
    for (int32_t i = 0; i < n_slots(); ++i) {
        if (all.empty() || options_.exact) {
            all.emplace_back();
        }
        all.back().push_back(i);
    }
    return all;
}

// One decode of the target, and all that follows from it.
void Engine::verify(const std::vector<int32_t> & indices, RoundTimes & times) {
    try {
        const std::vector<BatchToken> batch = plan_batch(indices);
        if (batch.empty()) {
            return;
        }
        const int64_t start = ggml_time_us();
        target_->decode(batch);
        const int64_t us = ggml_time_us() - start;
        times.verify += us;
        times.decodes.push_back({static_cast<int32_t>(batch.size()), static_cast<double>(us)});
        for (const int32_t i : indices) {
            Slot & slot = slots_[static_cast<size_t>(i)];
            if (slot.row < 0) {
                continue;
            }
            try {
                accept(slot);
            } catch (const std::exception & e) {  // a sampler's failure concerns its own request only
                fail(slot, e.what());
            }
        }
        cut_and_commit(indices, times);
        for (const int32_t i : indices) {
            if (slots_[static_cast<size_t>(i)].at_checkpoint) {
                keep_checkpoint(i);
            }
        }
    } catch (const std::exception & e) {
        for (const int32_t i : indices) {
            Slot & slot = slots_[static_cast<size_t>(i)];
            if (slot.row >= 0) {
                fail(slot, e.what());
                rewind(slot, i);
            }
        }
    }
}

void Engine::run_round() {
    for (int32_t i = 0; i < n_slots(); ++i) {
        Slot & slot = slots_[static_cast<size_t>(i)];
        slot.row = -1;
        slot.at_checkpoint = false;
        slot.n_rows = slot.n_kept = 0;
        slot.was_generating = slot.generating;
        slot.emitted.clear();
        slot.logprobs.clear();
        slot.n_before = target_->length(i);
    }
    const int64_t start = ggml_time_us();
    DraftRound round = plan_drafts();
    draft_blocks(round);
    RoundTimes times;
    times.draft = ggml_time_us() - start;
    for (const std::vector<int32_t> & indices : decodes()) {
        verify(indices, times);
    }
    times.whole = ggml_time_us() - start;
    const bool has_prompts = std::any_of(slots_.begin(), slots_.end(),
                                         [](const Slot & slot) { return slot.row >= 0 && !slot.was_generating; });
    learn(round, times, has_prompts);
    for (Slot & slot : slots_) {
        if (slot.row >= 0 && slot.finish != Finish::error) {
            account(slot, times);
        }
    }
}

}  // namespace dspine
