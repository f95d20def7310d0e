#include "drafter/simulated_drafter.h"

#include <algorithm>
#include <stdexcept>

namespace dspine {
namespace {

// SplitMix64: a number that looks random, the same on every machine.
uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

}  // namespace

SimulatedDrafter::SimulatedDrafter(std::shared_ptr<DraftSource> drafter, std::vector<float> acceptance, uint64_t seed,
                                   int32_t n_vocab)
    : drafter_(std::move(drafter)), acceptance_(std::move(acceptance)), seed_(seed), n_vocab_(n_vocab) {
    if (!drafter_ || n_vocab_ < 2) {
        throw std::invalid_argument("a simulated drafter needs a drafter and a vocabulary of two tokens or more");
    }
    if (acceptance_.empty() ||
        !std::all_of(acceptance_.begin(), acceptance_.end(), [](float p) { return p >= 0.0f && p <= 1.0f; })) {
        throw std::invalid_argument("acceptance needs at least one probability, each from 0 to 1");
    }
}

void SimulatedDrafter::expect(std::vector<int32_t> prompt, const std::vector<int32_t> & answer) {
    prompt_hash_ = seed_;
    for (const int32_t token : prompt) {
        prompt_hash_ = mix(prompt_hash_ ^ static_cast<uint64_t>(token));
    }
    known_ = std::move(prompt);
    known_.insert(known_.end(), answer.begin(), answer.end());
}

// One draw for each position of the sequence, whatever block it is drafted in. A position is decided only once: the
// next block begins behind the last one that was.
bool SimulatedDrafter::is_right(size_t position, size_t draft_position) const {
    if (draft_position >= acceptance_.size()) {
        return false;
    }
    const double drawn = static_cast<double>(mix(prompt_hash_ ^ mix(position)) >> 11) * 0x1.0p-53;  // [0, 1)
    return drawn < static_cast<double>(acceptance_[draft_position]);
}

std::vector<Draft> SimulatedDrafter::draft(const std::vector<BlockRequest> & blocks, int32_t n_draft) {
    std::vector<Draft> drafts = drafter_->draft(blocks, n_draft);
    for (size_t b = 0; b < std::min(drafts.size(), blocks.size()); ++b) {
        if (blocks[b].tokens == nullptr) {  // drafted for its costs only
            continue;
        }
        const std::vector<int32_t> & sequence = *blocks[b].tokens;
        if (sequence.size() > known_.size() || !std::equal(sequence.begin(), sequence.end(), known_.begin())) {
            continue;
        }
        std::vector<int32_t> & tokens = drafts[b].tokens;
        drafts[b].probabilities.assign(tokens.size(), 0.0f);
        for (size_t i = 0; i < tokens.size(); ++i) {
            drafts[b].probabilities[i] = i < acceptance_.size() ? acceptance_[i] : 0.0f;
            const size_t position = sequence.size() + i;
            if (position >= known_.size()) {
                continue;
            }
            const int32_t right = known_[position];
            if (is_right(position, i)) {
                tokens[i] = right;
            } else if (tokens[i] == right) {
                tokens[i] = (right + 1) % n_vocab_;
            }
        }
    }
    return drafts;
}

}  // namespace dspine
