// What a slot holds: shown, saved, restored and erased. Between rounds; callers may be any thread.
#include <algorithm>

#include "base/errors.h"
#include "engine/engine.h"

namespace dspine {

std::vector<SlotInfo> Engine::slots() const {
    const std::lock_guard<std::mutex> lock(step_mutex_);
    std::vector<SlotInfo> out;
    for (int32_t i = 0; i < n_slots(); ++i) {
        const Slot & slot = slots_[static_cast<size_t>(i)];
        SlotInfo info = {i, -1, slot.generating, target_->length(i), 0, 0};
        if (slot.job) {
            info.request = slot.job->id;
            info.n_prompt = slot.job->stats.n_prompt;
            info.n_generated = slot.job->stats.n_generated;
        }
        out.push_back(info);
    }
    return out;
}

std::optional<Costs> Engine::costs() const {
    const std::lock_guard<std::mutex> lock(step_mutex_);
    return policy_ ? std::optional<Costs>({policy_->verify_costs(), policy_->draft_costs()}) : std::nullopt;
}

size_t Engine::checkpoint_bytes() const {
    const std::lock_guard<std::mutex> lock(step_mutex_);
    return checkpoints_.bytes();
}

Engine::Slot & Engine::idle_slot(int32_t index) {
    if (index < 0 || index >= n_slots()) {
        throw std::invalid_argument("no slot " + std::to_string(index) + ", the engine has " +
                                    std::to_string(n_slots()));
    }
    Slot & slot = slots_[static_cast<size_t>(index)];
    if (slot.job) {
        throw std::invalid_argument("slot " + std::to_string(index) + " is answering a request, expected an idle one");
    }
    return slot;
}

SlotState Engine::save_slot(int32_t index) {
    const std::lock_guard<std::mutex> lock(step_mutex_);
    const Slot & slot = idle_slot(index);
    if (slot.tokens.empty()) {
        throw std::invalid_argument("slot " + std::to_string(index) + " is empty, there is nothing to save");
    }
    return {slot.tokens, target_->save_state(index), drafter_ ? drafter_->save(index) : ""};
}

void Engine::restore_slot(int32_t index, const SlotState & state) {
    const std::lock_guard<std::mutex> lock(step_mutex_);
    Slot & slot = idle_slot(index);
    const auto fits = [&](int32_t token) { return token >= 0 && token < target_->n_vocab(); };
    if (state.tokens.empty() || !std::all_of(state.tokens.begin(), state.tokens.end(), fits)) {
        throw ModelFormatError("the saved slot has no tokens, or some outside the vocabulary");
    }
    if (state.tokens.size() > static_cast<size_t>(target_->n_ctx_seq())) {
        throw ContextLengthError("the saved slot has " + std::to_string(state.tokens.size()) +
                                 " tokens, the context holds " + std::to_string(target_->n_ctx_seq()));
    }
    erase(slot, index);
    try {
        target_->load_state(index, state.target, static_cast<int32_t>(state.tokens.size()));
        if (drafter_ && !state.drafter.empty()) {  // without: prompts are read again for the drafter's sake
            drafter_->load(index, state.drafter);
            if (drafter_->length(index) > target_->length(index)) {
                throw ModelFormatError("the saved slot's drafter is ahead of its target");
            }
        }
    } catch (...) {
        erase(slot, index);
        throw;
    }
    slot.tokens = state.tokens;
    slot.last_used = ++clock_;
}

void Engine::erase_slot(int32_t index) {
    const std::lock_guard<std::mutex> lock(step_mutex_);
    erase(idle_slot(index), index);
}

void Engine::erase(Slot & slot, int32_t index) {
    target_->clear(index);
    checkpoints_.cut(index, 0);
    slot.backlog.clear();
    if (drafter_) {
        drafter_->truncate(index, 0);
    }
    slot.tokens.clear();
}

}  // namespace dspine
