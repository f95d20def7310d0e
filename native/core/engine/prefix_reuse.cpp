// What a new request starts from: the slot that holds most of its prompt, cut back to where both part. A recurrent
// target goes back to a checkpoint instead.
#include <algorithm>

#include "engine/engine.h"

namespace dspine {
namespace {

// The end of a chat's prompt asks for the answer, and the next turn may not repeat it: the checkpoint is before that.
constexpr int32_t CHECKPOINT_TAIL = 8;
// Fewer tokens than this are read again faster than a state is copied.
constexpr int32_t CHECKPOINT_STEP = 64;

int32_t common_prefix(const std::vector<int32_t> & a, const std::vector<int32_t> & b) {
    const size_t n = std::min(a.size(), b.size());
    return static_cast<int32_t>(std::mismatch(a.begin(), a.begin() + static_cast<ptrdiff_t>(n), b.begin()).first -
                                a.begin());
}

}  // namespace

// Tokens of the request's prompt that the slot need not read again.
int32_t Engine::reusable_prefix(int32_t index, const Request & request) const {
    if (!request.cache_prompt) {
        return 0;
    }
    const Slot & slot = slots_[static_cast<size_t>(index)];
    // At least one token must be decoded for its logits.
    int32_t n = std::min(common_prefix(slot.tokens, request.tokens), static_cast<int32_t>(request.tokens.size()) - 1);
    if (drafter_ && draft_length(request) != 0) {
        n = drafter_->reusable(index, n);  // or anything shorter: what follows is committed again
    }
    return std::max(target_->reusable(index, n), checkpoints_.longest(index, n));
}

int32_t Engine::choose_slot(const Request & request) const {
    int32_t best = -1;
    int32_t best_prefix = 0;
    for (int32_t i = 0; i < n_slots(); ++i) {
        const Slot & slot = slots_[static_cast<size_t>(i)];
        if (slot.job || (request.slot >= 0 && request.slot != i)) {
            continue;
        }
        const int32_t prefix = reusable_prefix(i, request);
        const bool older = best >= 0 && slot.last_used < slots_[static_cast<size_t>(best)].last_used;
        if (best < 0 || prefix > best_prefix || (prefix == best_prefix && older)) {
            best = i;
            best_prefix = prefix;
        }
    }
    return best;
}

void Engine::reuse_prefix(int32_t index) {
    Slot & slot = slots_[static_cast<size_t>(index)];
    const Request & request = slot.job->request;
    slot.branch = 0;
    for (const Slot & other : slots_) {
        slot.branch = std::max(slot.branch, common_prefix(other.tokens, request.tokens));
    }
    const int32_t n = reusable_prefix(index, request);
    if (target_->reusable(index, n) == n) {
        if (n == target_->length(index)) {  // the end of an answer: a later request may part from this one here
            keep_checkpoint(index);
        }
        target_->truncate(index, n);
    } else {
        target_->load_recurrent(index, checkpoints_.use(index, n), n);
    }
    checkpoints_.cut(index, n);
    if (drafter_) {
        drafter_->truncate(index, std::min(n, drafter_->length(index)));
    }
    slot.job->stats.n_reused = n;
    slot.tokens = request.tokens;
}

// How far the prompt may be read in one go: a recurrent target stops for a checkpoint before the prompt's end, and
// where the prompt parts from one that was read before, since others may do the same. A drafter that has lost its
// window by then needs an earlier one. Strict: neither the drafter nor other slots change how a prompt is read.
int32_t Engine::prompt_stop(int32_t index) const {
    const Slot & slot = slots_[static_cast<size_t>(index)];
    const int32_t n_prompt = static_cast<int32_t>(slot.tokens.size());
    const int32_t lookback = keeps_drafter(slot) && !options_.exact ? drafter_->lookback() : 0;
    const int32_t branch = options_.exact ? 0 : slot.branch;
    int32_t stop = n_prompt;
    for (const int32_t end : {branch, n_prompt - CHECKPOINT_TAIL}) {
        for (const int32_t mark : {end - lookback, end}) {
            if (mark > slot.n_before && wants_checkpoint(index, mark)) {
                stop = std::min(stop, mark);
            }
        }
    }
    return stop;
}

bool Engine::wants_checkpoint(int32_t index, int32_t n) const {
    return target_->is_recurrent() && checkpoints_.enabled() && n - checkpoints_.longest(index, n) >= CHECKPOINT_STEP;
}

void Engine::keep_checkpoint(int32_t index) {
    const int32_t n = target_->length(index);
    if (wants_checkpoint(index, n)) {
        checkpoints_.add(index, n, target_->save_recurrent(index));
    }
}

}  // namespace dspine
