// Rounds of draft and verify over several sequences (docs/design.md). One thread steps; requests are submitted and
// cancelled from any thread.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "drafter/draft_source.h"
#include "engine/feature_backlog.h"
#include "engine/state_checkpoints.h"
#include "policy/draft_length.h"
#include "policy/exact_lengths.h"
#include "target/logprobs.h"
#include "target/sampling.h"
#include "target/target.h"

namespace dspine {

// Instead of a number of tokens: chosen every round by measurement (policy/draft_length.h).
inline constexpr int32_t AUTO_DRAFT = -1;

struct Request {
    std::vector<int32_t> tokens;  // the prompt
    SamplingParams sampling;
    int32_t max_tokens = -1;  // -1: until the context is full
    std::vector<int32_t> stop_tokens;
    std::optional<int32_t> n_draft;  // none: the engine's; 0: plain decoding
    bool cache_prompt = true;        // start from the longest known prefix
    int32_t n_probs = -1;            // candidates whose log-probabilities are told with every token; -1: none at all
    bool post_sampling = false;      // those of the distribution that is sampled from, not of the model's logits
    int32_t slot = -1;               // wait for this one; -1: any
    std::vector<int32_t> replay;     // a known answer: its tokens are emitted, whatever is sampled; for simulations
};

struct RequestStats {
    int32_t n_prompt = 0;     // tokens of the prompt
    int32_t n_reused = 0;     // of those, taken from a cache
    int32_t n_generated = 0;  // emitted tokens
    int32_t n_rounds = 0;     // verify rounds
    int32_t n_drafted = 0;
    int32_t n_accepted = 0;
    std::vector<int32_t> rounds_by_draft;  // by number of verified draft tokens
    std::vector<int32_t> drafted_at;       // by draft position, how often one was verified
    std::vector<int32_t> accepted_at;      // likewise, and accepted
    int64_t prefill_us = 0;                // sampling the first token included
    int64_t draft_us = 0;                  // of the rounds that the request took part in
    int64_t verify_us = 0;
    int64_t commit_us = 0;
    int64_t round_us = 0;  // whole rounds: what is not draft, verify or commit is everything else
};

enum class Finish { none, stop, length, cancelled, error };

// What one step did to one request.
struct StepEvent {
    int64_t id;
    std::vector<int32_t> tokens;          // emitted now, in order
    std::vector<TokenLogprobs> logprobs;  // one per token when asked for, else empty
    Finish finish = Finish::none;
    std::string error;   // with Finish::error
    RequestStats stats;  // final once finished
    int32_t slot = -1;   // -1: it was still queued
};

struct EngineOptions {
    int32_t n_draft = 7;  // or AUTO_DRAFT
    // For AUTO_DRAFT: what the target's decode costs by tokens, and the drafter by blocks times draft length.
    std::vector<CostPoint> verify_costs;
    std::vector<CostPoint> draft_costs;
    // Host memory for states that a recurrent target can go back to, of all slots together; 0: it starts anew.
    size_t checkpoint_bytes = size_t{512} << 20;
    // Strict: drafts of these lengths only, and a decode for every slot alone. A row's last bits depend on how many
    // rows are computed with it, so neither drafting nor what other slots do then changes an answer.
    std::optional<ExactLengths> exact;
};

struct SlotLengths {
    int32_t target;
    int32_t drafter;  // -1 without one
};

struct SlotInfo {
    int32_t id;
    int64_t request;   // -1: idle
    bool generating;   // false: idle, or reading the prompt
    int32_t n_cached;  // positions that the target's cache holds
    int32_t n_prompt;
    int32_t n_generated;
};

// An idle slot, outside the engine. `drafter` is empty when there was none.
struct SlotState {
    std::vector<int32_t> tokens;
    std::string target;
    std::string drafter;
};

class Engine {
  public:
    // Throws PairingError, std::invalid_argument. `drafter` may be null: plain decoding.
    Engine(std::shared_ptr<Target> target, std::shared_ptr<DraftSource> drafter, const EngineOptions & options);

    // Throws std::invalid_argument, ContextLengthError.
    int64_t submit(Request request);
    // False when there is no such request any more.
    bool cancel(int64_t id);
    bool has_work() const;
    // One round. Failures end the requests they hit and show in their events.
    std::vector<StepEvent> step();

    // What the automatic draft length goes by now; none where the length is fixed.
    std::optional<Costs> costs() const;
    size_t checkpoint_bytes() const;  // held now
    // The last n rounds with automatic slots are kept for take_rounds(), oldest first; 0, the default: none.
    void record_rounds(size_t n);
    std::vector<RoundRecord> take_rounds();
    int32_t n_slots() const { return static_cast<int32_t>(slots_.size()); }
    int64_t n_replaced() const { return n_replaced_; }  // replayed tokens that were not what was sampled
    SlotLengths lengths(int32_t slot) const;

    // slot_state.cpp. Saving, restoring and erasing need an idle slot. Throws std::invalid_argument, and for a state
    // that does not fit ModelFormatError or ContextLengthError: the slot is then empty, or as it was.
    std::vector<SlotInfo> slots() const;
    SlotState save_slot(int32_t slot);
    void restore_slot(int32_t slot, const SlotState & state);
    void erase_slot(int32_t slot);
    Target & target() { return *target_; }

  private:
    struct Job {
        int64_t id;
        Request request;
        std::unique_ptr<Sampler> sampler;
        RequestStats stats;
        Forecast forecast = DraftLengthPolicy::new_forecast();
        std::atomic<bool> cancelled{false};
    };
    struct Slot {
        std::shared_ptr<Job> job;     // null: idle
        std::vector<int32_t> tokens;  // prompt and emitted; when idle, the tokens whose state the caches hold
        int32_t n_draft = 0;          // AUTO_DRAFT, or a fixed length; 0: the drafter's cache is not kept up
        FeatureBacklog backlog;       // committed by the target, not yet read by the drafter
        int64_t last_used = 0;
        bool generating = false;  // false: the prompt is being read
        int32_t branch = 0;       // where the prompt parts from those that slots held
        // Of the round that is running.
        int32_t row = -1;      // its first row in the batch, -1: takes no part
        int32_t n_rows = 0;    // rows in the batch
        int32_t n_kept = 0;    // of those, rows that stay
        int32_t n_before = 0;  // committed length when the round began
        bool was_generating = false;
        bool at_checkpoint = false;    // the state is kept at the round's end
        int32_t limit = 0;             // longest draft that can be used
        std::vector<int32_t> lengths;  // strict: of these
        std::vector<int32_t> draft;
        std::vector<float> probabilities;  // of the drafted tokens, as the drafter sees them
        int32_t n_unverified = 0;          // drafted tokens that are not worth their row
        std::vector<int32_t> emitted;
        std::vector<TokenLogprobs> logprobs;  // of these
        Finish finish = Finish::none;
        std::string error;

        int32_t n_verified() const { return static_cast<int32_t>(draft.size()) - n_unverified; }
    };
    // Microseconds, of all decodes of the round together.
    struct RoundTimes {
        int64_t draft = 0;
        int64_t verify = 0;
        int64_t commit = 0;
        int64_t whole = 0;
        std::vector<CostPoint> decodes;
    };
    struct DraftRound {
        DraftPlan plan;                  // of the automatic slots
        std::vector<int32_t> automatic;  // slots whose length is planned
        std::vector<int32_t> drafting;   // slots that get a draft
        int32_t n_longest = 0;           // length of the drafter's blocks
        int32_t n_other = 0;             // rows of slots that are not planned
        int32_t n_columns = 0;           // drafted in all, 0: nothing was
    };

    void check(const Request & request) const;
    int32_t draft_length(const Request & request) const;
    void admit();
    void drop_cancelled(std::vector<StepEvent> & events);
    bool keeps_drafter(const Slot & slot) const { return drafter_ != nullptr && slot.n_draft != 0; }
    int32_t drafter_length(int32_t index) const;
    void release(int32_t index, std::vector<StepEvent> & events);

    // prefix_reuse.cpp
    int32_t choose_slot(const Request & request) const;
    int32_t reusable_prefix(int32_t index, const Request & request) const;
    void reuse_prefix(int32_t index);
    int32_t prompt_stop(int32_t index) const;
    bool wants_checkpoint(int32_t index, int32_t n) const;
    void keep_checkpoint(int32_t index);

    // slot_state.cpp
    Slot & idle_slot(int32_t index);
    void erase(Slot & slot, int32_t index);

    // engine_draft.cpp
    void limit_draft(Slot & slot, int32_t index) const;
    DraftRound plan_drafts();
    void draft_blocks(DraftRound & round);
    void cut_drafts(const DraftRound & round);
    void learn(const DraftRound & round, const RoundTimes & times, bool has_prompts);

    // engine_round.cpp
    std::vector<BatchToken> plan_batch(const std::vector<int32_t> & indices);
    void accept(Slot & slot);
    void cut_and_commit(const std::vector<int32_t> & indices, RoundTimes & times);
    std::vector<std::vector<int32_t>> decodes() const;
    void verify(const std::vector<int32_t> & indices, RoundTimes & times);
    void flush_features(const std::vector<int32_t> & indices);
    void fail(Slot & slot, const std::string & why);
    void rewind(Slot & slot, int32_t index);
    void forget(Slot & slot, int32_t index);
    void account(Slot & slot, const RoundTimes & times);
    void run_round();

    std::shared_ptr<Target> target_;
    std::shared_ptr<DraftSource> drafter_;
    EngineOptions options_;
    std::unique_ptr<DraftLengthPolicy> policy_;  // with AUTO_DRAFT
    std::deque<RoundRecord> records_;
    size_t n_records_ = 0;
    std::vector<Slot> slots_;
    StateCheckpoints checkpoints_;
    int32_t n_draft_max_ = 0;
    std::atomic<bool> stepping_{false};  // one step at a time
    std::atomic<int64_t> n_replaced_{0};
    mutable std::mutex step_mutex_;  // of slots and caches

    mutable std::mutex mutex_;  // of what follows
    std::deque<std::shared_ptr<Job>> queue_;
    std::deque<std::shared_ptr<Job>> running_;
    int64_t next_id_ = 1;
    int64_t clock_ = 0;
};

}  // namespace dspine
