// One request's sampler: llama.cpp's chain in llama-server's order, and a shortcut when it is plain greedy.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "llama-cpp.h"
#include "target/logprobs.h"

namespace dspine {

// Names and defaults are llama-server's.
struct SamplingParams {
    uint32_t seed = LLAMA_DEFAULT_SEED;  // the default draws one
    float temperature = 0.8f;            // 0: greedy
    float dynatemp_range = 0.0f;
    float dynatemp_exponent = 1.0f;
    int32_t top_k = 40;
    float top_p = 0.95f;
    float min_p = 0.05f;
    float typical_p = 1.0f;
    float top_n_sigma = -1.0f;
    float xtc_probability = 0.0f;
    float xtc_threshold = 0.1f;
    int32_t repeat_last_n = 64;  // -1: the whole context
    float repeat_penalty = 1.0f;
    float frequency_penalty = 0.0f;
    float presence_penalty = 0.0f;
    float dry_multiplier = 0.0f;
    float dry_base = 1.75f;
    int32_t dry_allowed_length = 2;
    int32_t dry_penalty_last_n = -1;
    std::vector<std::string> dry_sequence_breakers = {"\n", ":", "\"", "*"};
    // In this order; one that is not named is not used. At temperature 0 only penalties and dry matter.
    std::vector<std::string> samplers = {"penalties", "dry",   "top_n_sigma", "top_k",      "typ_p",
                                         "top_p",     "min_p", "xtc",         "temperature"};
    int32_t min_keep = 0;  // tokens that typ_p, top_p, min_p and xtc leave at least
    std::vector<std::pair<int32_t, float>> logit_bias;
    bool ignore_eos = false;
    std::string grammar;  // GBNF
};

class Sampler {
  public:
    // Throws std::invalid_argument for a value that llama.cpp would abort on or ignore.
    Sampler(const llama_model * model, int32_t n_ctx, const SamplingParams & params);

    // Tokens before the first sampled one: penalties count them, the grammar does not.
    void accept_prompt(const std::vector<int32_t> & tokens);
    // Samples from logits [n_vocab] and advances: exactly one call per emitted token.
    int32_t sample(const float * logits);
    // Of the last sample(): the distribution that it was drawn from, behind grammar and samplers. Tokens that these
    // have ruled out are left out of the candidates, so there may be fewer than n_top.
    TokenLogprobs sampled_logprobs(int32_t n_top) const;

  private:
    int32_t n_vocab_;
    bool greedy_;  // temperature 0
    bool argmax_;  // and nothing in the chain can change which logit is the largest
    llama_sampler_ptr grammar_;
    llama_sampler_ptr chain_;
    std::vector<llama_token_data> candidates_;
    size_t n_left_ = 0;  // of the candidates, behind the last sample()
    int32_t last_ = -1;  // the token of it
};

}  // namespace dspine
