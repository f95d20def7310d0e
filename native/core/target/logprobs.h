// Log-probabilities of one emitted token, from the logits that it was sampled from. Called by the engine, and only for
// requests that ask for them: it reads the whole vocabulary.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace dspine {

struct TokenLogprobs {
    float logprob;                               // of the emitted token, natural logarithm
    std::vector<std::pair<int32_t, float>> top;  // most likely first; equal ones by token id
};

// logits: float32 [n_vocab], as the target gave them, before penalties, grammar and temperature (as in llama-server).
TokenLogprobs token_logprobs(const float * logits, int32_t n_vocab, int32_t token, int32_t n_top);

}  // namespace dspine
