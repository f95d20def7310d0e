// A drafter of known quality, for benchmarks: another drafter runs and costs what it costs, then its tokens are made
// right or wrong against an answer that is known beforehand (docs/benchmarking.md).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "drafter/draft_source.h"

namespace dspine {

class SimulatedDrafter final : public DraftSource {
  public:
    // acceptance: by draft position, the probability that a token is right given that all before it are; tokens beyond
    // its end are always wrong. Throws std::invalid_argument for an empty list or values outside 0 to 1.
    SimulatedDrafter(std::shared_ptr<DraftSource> drafter, std::vector<float> acceptance, uint64_t seed,
                     int32_t n_vocab);

    // The answer that requests with this prompt will get. Call it while no request runs.
    void expect(std::vector<int32_t> prompt, const std::vector<int32_t> & answer);

    int32_t max_draft() const override { return drafter_->max_draft(); }
    int32_t n_seq() const override { return drafter_->n_seq(); }
    int32_t n_ctx() const override { return drafter_->n_ctx(); }
    const std::vector<int32_t> & taps() const override { return drafter_->taps(); }
    int32_t length(int32_t seq) const override { return drafter_->length(seq); }
    int32_t reusable(int32_t seq, int32_t n) const override { return drafter_->reusable(seq, n); }
    int32_t lookback() const override { return drafter_->lookback(); }
    void truncate(int32_t seq, int32_t n) override { drafter_->truncate(seq, n); }
    std::string save(int32_t seq) const override { return drafter_->save(seq); }
    void load(int32_t seq, const std::string & state) override { drafter_->load(seq, state); }
    void commit(const std::vector<FeatureRows> & rows) override { drafter_->commit(rows); }

    // Where the answer is not known, behind its end or because the sequence has left it, the drafter's tokens stay.
    std::vector<Draft> draft(const std::vector<BlockRequest> & blocks, int32_t n_draft) override;

  private:
    bool is_right(size_t position, size_t draft_position) const;

    std::shared_ptr<DraftSource> drafter_;
    std::vector<float> acceptance_;
    uint64_t seed_;
    int32_t n_vocab_;
    std::vector<int32_t> known_;  // prompt and answer
    uint64_t prompt_hash_ = 0;
};

}  // namespace dspine
