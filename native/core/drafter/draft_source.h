// Where drafts come from, as the engine sees it: the DSpine drafter, or any other guess of the next tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "drafter/transitions.h"

namespace dspine {

// Features of n consecutive positions: per tap a pointer to float32 rows of n_embd values, `stride` floats apart.
struct FeatureRows {
    int32_t seq;
    int32_t n;
    std::vector<const float *> taps;  // as many as the source taps
    size_t stride;
};

struct BlockRequest {
    int32_t seq;
    int32_t anchor;                                 // the last emitted token, not yet committed
    const std::vector<int32_t> * tokens = nullptr;  // the sequence so far, anchor included
};

// Keeps committed context per sequence. After every round its lengths equal the target's.
class DraftSource {
  public:
    virtual ~DraftSource() = default;

    virtual int32_t max_draft() const = 0;
    virtual int32_t n_seq() const = 0;
    virtual int32_t n_ctx() const = 0;                      // positions per sequence that it can keep
    virtual const std::vector<int32_t> & taps() const = 0;  // layer inputs of the target that commit() reads

    virtual int32_t length(int32_t seq) const = 0;
    // A length up to n that the sequence can be cut back to, so that reading on from there loses nothing.
    virtual int32_t reusable(int32_t seq, int32_t n) const = 0;
    virtual void truncate(int32_t seq, int32_t n) = 0;
    // Positions that reusable() may go back further than it was asked for; 0: none, the whole context is kept.
    virtual int32_t lookback() const = 0;
    // A sequence as bytes, and back. Throws ModelFormatError for bytes that do not fit.
    virtual std::string save(int32_t seq) const = 0;
    virtual void load(int32_t seq, const std::string & state) = 0;

    virtual void commit(const std::vector<FeatureRows> & rows) = 0;
    // One draft of up to n_draft tokens per block.
    virtual std::vector<Draft> draft(const std::vector<BlockRequest> & blocks, int32_t n_draft) = 0;
};

}  // namespace dspine
