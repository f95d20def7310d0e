#include "engine/engine.h"

#include <algorithm>

#include "base/errors.h"

namespace dspine {

Engine::Engine(std::shared_ptr<Target> target, std::shared_ptr<DraftSource> drafter, const EngineOptions & options)
    : target_(std::move(target)),
      drafter_(std::move(drafter)),
      options_(options),
      checkpoints_(options.checkpoint_bytes) {
    slots_ = std::vector<Slot>(static_cast<size_t>(target_->n_seq()));
    n_draft_max_ = drafter_ ? std::min(drafter_->max_draft(), target_->n_rollback()) : 0;
    if (!drafter_) {
        options_.n_draft = 0;
        return;
    }
    if (options_.n_draft == AUTO_DRAFT) {
        policy_ = std::make_unique<DraftLengthPolicy>(options_.verify_costs, options_.draft_costs,
                                                      /*apart=*/options_.exact.has_value());
    } else if (options_.n_draft < 0 || options_.n_draft > n_draft_max_) {
        throw std::invalid_argument("n_draft = " + std::to_string(options_.n_draft) + ", expected 0 to " +
                                    std::to_string(n_draft_max_) + " (the drafter gives up to " +
                                    std::to_string(drafter_->max_draft()) + ", the target was made for " +
                                    std::to_string(target_->n_rollback()) + ")");
    }
    if (drafter_->n_seq() < target_->n_seq() || drafter_->n_ctx() < target_->n_ctx_seq()) {
        throw std::invalid_argument("the drafter keeps " + std::to_string(drafter_->n_seq()) + " sequences of " +
                                    std::to_string(drafter_->n_ctx()) + " positions, the target " +
                                    std::to_string(target_->n_seq()) + " of " + std::to_string(target_->n_ctx_seq()));
    }
    target_->need_rollback(n_draft_max_);
    target_->enable_taps(drafter_->taps());
    for (int32_t seq = 0; seq < n_slots(); ++seq) {
        target_->clear(seq);
        drafter_->truncate(seq, 0);
    }
}

// 0 where no draft could be verified: then the drafter's cache need not be kept up.
int32_t Engine::draft_length(const Request & request) const {
    const bool never = options_.exact && options_.exact->longest() == 0;
    return never ? 0 : request.n_draft.value_or(options_.n_draft);
}

void Engine::check(const Request & r) const {
    if (r.tokens.empty()) {
        throw std::invalid_argument("the prompt has no tokens");
    }
    for (const int32_t token : r.tokens) {
        if (token < 0 || token >= target_->n_vocab()) {
            throw std::invalid_argument("prompt token " + std::to_string(token) + " is outside the vocabulary of " +
                                        std::to_string(target_->n_vocab()));
        }
    }
    for (const int32_t token : r.replay) {
        if (token < 0 || token >= target_->n_vocab()) {
            throw std::invalid_argument("replayed token " + std::to_string(token) + " is outside the vocabulary of " +
                                        std::to_string(target_->n_vocab()));
        }
    }
    if (r.tokens.size() >= static_cast<size_t>(target_->n_ctx_seq())) {
        throw ContextLengthError("the prompt has " + std::to_string(r.tokens.size()) + " tokens, the context holds " +
                                 std::to_string(target_->n_ctx_seq()) + " with the answer");
    }
    if (r.max_tokens < -1) {
        throw std::invalid_argument("max_tokens = " + std::to_string(r.max_tokens) + ", expected -1 or more");
    }
    if (r.slot < -1 || r.slot >= n_slots()) {
        throw std::invalid_argument("slot = " + std::to_string(r.slot) + ", expected -1 to " +
                                    std::to_string(n_slots() - 1));
    }
    if (r.n_probs < -1) {
        throw std::invalid_argument("n_probs = " + std::to_string(r.n_probs) + ", expected -1 or more");
    }
    if (r.n_draft && (*r.n_draft < 0 || (drafter_ != nullptr && *r.n_draft > n_draft_max_))) {
        throw std::invalid_argument("n_draft = " + std::to_string(*r.n_draft) + ", expected 0 to " +
                                    std::to_string(n_draft_max_));
    }
}

int64_t Engine::submit(Request request) {
    check(request);
    auto job = std::make_shared<Job>();
    job->sampler = std::make_unique<Sampler>(target_->model(), target_->n_ctx_seq(), request.sampling);
    job->sampler->accept_prompt(request.tokens);
    job->stats.n_prompt = static_cast<int32_t>(request.tokens.size());
    job->request = std::move(request);
    const std::lock_guard<std::mutex> lock(mutex_);
    job->id = next_id_++;
    queue_.push_back(job);
    return job->id;
}

bool Engine::cancel(int64_t id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto * jobs : {&queue_, &running_}) {
        for (const std::shared_ptr<Job> & job : *jobs) {
            if (job->id == id) {
                job->cancelled = true;
                return true;
            }
        }
    }
    return false;
}

bool Engine::has_work() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !queue_.empty() || !running_.empty();
}

SlotLengths Engine::lengths(int32_t slot) const {
    if (slot < 0 || slot >= n_slots()) {
        throw std::invalid_argument("no slot " + std::to_string(slot) + ", the engine has " +
                                    std::to_string(n_slots()));
    }
    const std::lock_guard<std::mutex> lock(step_mutex_);
    return {target_->length(slot), drafter_ ? drafter_length(slot) : -1};
}

int32_t Engine::drafter_length(int32_t index) const {
    return drafter_->length(index) + slots_[static_cast<size_t>(index)].backlog.size();
}

void Engine::admit() {
    for (;;) {
        std::shared_ptr<Job> job;
        int32_t index = -1;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            // In order, but one that waits for a certain slot holds up nobody else.
            const auto next = std::find_if(queue_.begin(), queue_.end(), [&](const std::shared_ptr<Job> & waiting) {
                index = choose_slot(waiting->request);
                return index >= 0;
            });
            if (next == queue_.end()) {
                return;
            }
            job = *next;
            queue_.erase(next);
            running_.push_back(job);
        }
        Slot & slot = slots_[static_cast<size_t>(index)];
        slot.job = job;
        slot.n_draft = draft_length(job->request);
        slot.last_used = ++clock_;
        slot.generating = false;
        slot.finish = Finish::none;
        slot.error.clear();
        try {
            reuse_prefix(index);
        } catch (const std::exception & e) {
            fail(slot, e.what());
            forget(slot, index);
        }
    }
}

void Engine::drop_cancelled(std::vector<StepEvent> & events) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto it = queue_.begin(); it != queue_.end();) {
            if ((*it)->cancelled) {
                events.push_back({(*it)->id, {}, {}, Finish::cancelled, "", (*it)->stats, -1});
                it = queue_.erase(it);
            } else {
                ++it;
            }
        }
    }
    for (int32_t i = 0; i < n_slots(); ++i) {
        Slot & slot = slots_[static_cast<size_t>(i)];
        if (slot.job && slot.job->cancelled) {
            slot.finish = Finish::cancelled;
            slot.emitted.clear();
            slot.logprobs.clear();
            release(i, events);
        }
    }
}

// Tells what the step did to the slot's request, and frees the slot when it has finished.
void Engine::release(int32_t index, std::vector<StepEvent> & events) {
    Slot & slot = slots_[static_cast<size_t>(index)];
    events.push_back({slot.job->id, std::move(slot.emitted), std::move(slot.logprobs), slot.finish, slot.error,
                      slot.job->stats, index});
    slot.emitted.clear();
    slot.logprobs.clear();
    if (slot.finish == Finish::none) {
        return;
    }
    try {
        flush_features({index});
    } catch (const std::exception &) {  // the answer stands, the caches cannot be kept
        forget(slot, index);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    running_.erase(std::find(running_.begin(), running_.end(), slot.job));
    slot.job.reset();
    // What stays is what the caches hold: the last emitted token is in neither.
    slot.tokens.resize(std::min(slot.tokens.size(), static_cast<size_t>(target_->length(index))));
}

std::vector<StepEvent> Engine::step() {
    struct Stepping {
        std::atomic<bool> & flag;
        const bool first = !flag.exchange(true);
        ~Stepping() {
            if (first) {
                flag = false;
            }
        }
    } const stepping{stepping_};
    if (!stepping.first) {
        throw std::runtime_error("the engine is being stepped by another thread");
    }
    const std::lock_guard<std::mutex> lock(step_mutex_);
    std::vector<StepEvent> events;
    drop_cancelled(events);
    admit();
    run_round();
    for (int32_t i = 0; i < n_slots(); ++i) {
        Slot & slot = slots_[static_cast<size_t>(i)];
        if (slot.job && (!slot.emitted.empty() || slot.finish != Finish::none)) {
            release(i, events);
        }
    }
    return events;
}

}  // namespace dspine
