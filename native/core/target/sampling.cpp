#include "target/sampling.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace dspine {
namespace {

constexpr size_t MAX_SAMPLERS = 64;

void check(const SamplingParams & p, int32_t n_vocab) {
    const auto need = [](bool good, const char * name, auto value, const char * expected) {
        if (!good) {
            throw std::invalid_argument(std::string(name) + " = " + std::to_string(value) + ", expected " + expected);
        }
    };
    const auto not_negative = [&](const char * name, float value) {
        need(std::isfinite(value) && value >= 0.0f, name, value, "a number of at least 0");
    };
    not_negative("temperature", p.temperature);
    not_negative("dynatemp_range", p.dynatemp_range);
    not_negative("dynatemp_exponent", p.dynatemp_exponent);
    not_negative("top_p", p.top_p);
    not_negative("min_p", p.min_p);
    not_negative("typical_p", p.typical_p);
    not_negative("xtc_probability", p.xtc_probability);
    not_negative("xtc_threshold", p.xtc_threshold);
    not_negative("dry_multiplier", p.dry_multiplier);
    need(std::isfinite(p.top_n_sigma), "top_n_sigma", p.top_n_sigma, "a finite number");
    need(std::isfinite(p.repeat_penalty) && p.repeat_penalty > 0.0f, "repeat_penalty", p.repeat_penalty,
         "a number above 0");
    need(std::isfinite(p.frequency_penalty), "frequency_penalty", p.frequency_penalty, "a finite number");
    need(std::isfinite(p.presence_penalty), "presence_penalty", p.presence_penalty, "a finite number");
    need(std::isfinite(p.dry_base), "dry_base", p.dry_base, "a finite number");
    need(p.repeat_last_n >= -1, "repeat_last_n", p.repeat_last_n, "-1 or more");
    need(p.min_keep >= 0, "min_keep", p.min_keep, "0 or more");
    need(p.samplers.size() <= MAX_SAMPLERS, "number of samplers", p.samplers.size(), "at most 64");
    need(p.dry_penalty_last_n >= -1, "dry_penalty_last_n", p.dry_penalty_last_n, "-1 or more");
    for (const auto & [token, bias] : p.logit_bias) {
        need(token >= 0 && token < n_vocab, "logit_bias token", token, "a token of the vocabulary");
        need(!std::isnan(bias), "logit_bias", bias, "a number");
    }
}

// llama.cpp's parser recurses once per parenthesis, on the stack.
constexpr int MAX_GRAMMAR_DEPTH = 200;
constexpr size_t MAX_GRAMMAR_BYTES = 1 << 20;

void check_grammar(const std::string & text) {
    if (text.size() > MAX_GRAMMAR_BYTES) {
        throw std::invalid_argument("the grammar has " + std::to_string(text.size()) + " bytes, expected at most " +
                                    std::to_string(MAX_GRAMMAR_BYTES));
    }
    int depth = 0;
    int deepest = 0;
    for (const char c : text) {  // parentheses in literals count too: the bound is far above any real grammar
        depth += c == '(' ? 1 : c == ')' ? -1 : 0;
        deepest = std::max(deepest, depth);
    }
    if (deepest > MAX_GRAMMAR_DEPTH) {
        throw std::invalid_argument("the grammar nests " + std::to_string(deepest) + " parentheses, expected at most " +
                                    std::to_string(MAX_GRAMMAR_DEPTH));
    }
}

// A sampler that does not look back, by its name; llama-server's alternative spellings are understood.
llama_sampler * make_sampler(const std::string & name, const SamplingParams & p) {
    const size_t min_keep = static_cast<size_t>(p.min_keep);
    if (name == "top_n_sigma") {
        return llama_sampler_init_top_n_sigma(p.top_n_sigma);
    }
    if (name == "top_k") {
        return llama_sampler_init_top_k(p.top_k);
    }
    if (name == "typ_p" || name == "typical_p") {
        return llama_sampler_init_typical(p.typical_p, min_keep);
    }
    if (name == "top_p") {
        return llama_sampler_init_top_p(p.top_p, min_keep);
    }
    if (name == "min_p") {
        return llama_sampler_init_min_p(p.min_p, min_keep);
    }
    if (name == "xtc") {
        return llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, min_keep, p.seed);
    }
    if (name == "temperature") {
        return llama_sampler_init_temp_ext(p.temperature, p.dynatemp_range, p.dynatemp_exponent);
    }
    throw std::invalid_argument("unknown sampler '" + name +
                                "', expected penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc or "
                                "temperature");
}

// The first of the largest logits. Maxima of many lanes at a time, which compilers turn into vector instructions; then
// where the largest lies.
int32_t argmax(const float * logits, int32_t n) {
    constexpr int32_t N_LANES = 64;
    float lanes[N_LANES];
    std::fill(lanes, lanes + N_LANES, -INFINITY);
    const int32_t n_whole = n / N_LANES * N_LANES;
    for (int32_t i = 0; i < n_whole; i += N_LANES) {
        for (int32_t lane = 0; lane < N_LANES; ++lane) {
            lanes[lane] = logits[i + lane] > lanes[lane] ? logits[i + lane] : lanes[lane];
        }
    }
    float largest = *std::max_element(lanes, lanes + N_LANES);
    for (int32_t i = n_whole; i < n; ++i) {
        largest = std::max(largest, logits[i]);
    }
    const float * found = std::find(logits, logits + n, largest);
    return found == logits + n ? 0 : static_cast<int32_t>(found - logits);
}

}  // namespace

Sampler::Sampler(const llama_model * model, int32_t n_ctx, const SamplingParams & p)
    : n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))) {
    check(p, n_vocab_);
    const llama_vocab * vocab = llama_model_get_vocab(model);
    chain_.reset(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    // llama.cpp reserves room for as many tokens as it is told to look back on.
    const auto look_back = [n_ctx](int32_t n) { return n < 0 ? n_ctx : std::min(n, n_ctx); };
    const auto add = [&](llama_sampler * sampler) { llama_sampler_chain_add(chain_.get(), sampler); };

    std::vector<llama_logit_bias> bias;
    for (const auto & [token, value] : p.logit_bias) {
        bias.push_back({token, value});
    }
    for (int32_t token = 0; p.ignore_eos && token < n_vocab_; ++token) {
        if (llama_vocab_is_eog(vocab, token)) {
            bias.push_back({token, -INFINITY});
        }
    }
    const bool penalizes =
        p.repeat_last_n != 0 && (p.repeat_penalty != 1.0f || p.frequency_penalty != 0.0f || p.presence_penalty != 0.0f);
    const bool dry = p.dry_multiplier > 0.0f && p.dry_base >= 1.0f && p.dry_penalty_last_n != 0;
    for (const std::string & breaker : p.dry_sequence_breakers) {
        if (breaker.empty()) {
            throw std::invalid_argument("dry_sequence_breakers has an empty text");
        }
    }
    greedy_ = p.temperature == 0.0f;
    argmax_ = greedy_ && bias.empty() && !penalizes && !dry && p.grammar.empty();

    if (!bias.empty()) {
        add(llama_sampler_init_logit_bias(n_vocab_, static_cast<int32_t>(bias.size()), bias.data()));
    }
    std::vector<const char *> breakers;
    for (const std::string & breaker : p.dry_sequence_breakers) {
        breakers.push_back(breaker.c_str());
    }
    for (const std::string & name : p.samplers) {
        if (name == "penalties") {
            if (penalizes) {
                add(llama_sampler_init_penalties(n_vocab_, look_back(p.repeat_last_n), p.repeat_penalty,
                                                 p.frequency_penalty, p.presence_penalty));
            }
        } else if (name == "dry") {
            if (dry) {
                add(llama_sampler_init_dry(vocab, p.dry_multiplier, p.dry_base, p.dry_allowed_length,
                                           look_back(p.dry_penalty_last_n), breakers.data(), breakers.size()));
            }
        } else {
            const llama_sampler_ptr sampler(make_sampler(name, p));  // checks the name at any temperature
            if (p.temperature > 0.0f) {
                add(llama_sampler_clone(sampler.get()));
            }
        }
    }
    add(greedy_ ? llama_sampler_init_greedy() : llama_sampler_init_dist(p.seed));
    if (!p.grammar.empty()) {
        check_grammar(p.grammar);
        grammar_.reset(llama_sampler_init_grammar(vocab, p.grammar.c_str(), "root"));
        if (!grammar_) {
            throw std::invalid_argument("the grammar is not valid GBNF, or has no rule 'root'");
        }
    }
}

void Sampler::accept_prompt(const std::vector<int32_t> & tokens) {
    if (argmax_) {
        return;
    }
    for (const int32_t token : tokens) {
        llama_sampler_accept(chain_.get(), token);
    }
}

int32_t Sampler::sample(const float * logits) {
    if (argmax_) {
        last_ = argmax(logits, n_vocab_);
        return last_;
    }
    candidates_.resize(static_cast<size_t>(n_vocab_));
    for (int32_t i = 0; i < n_vocab_; ++i) {
        candidates_[static_cast<size_t>(i)] = {i, logits[i], 0.0f};
    }
    llama_token_data_array array = {candidates_.data(), candidates_.size(), -1, false};
    if (grammar_) {
        llama_sampler_apply(grammar_.get(), &array);
    }
    llama_sampler_apply(chain_.get(), &array);
    if (array.selected < 0 || static_cast<size_t>(array.selected) >= array.size ||
        !(array.data[array.selected].logit > -INFINITY)) {
        // The grammar must not be told of a token that it has ruled out: llama.cpp would abort.
        throw std::runtime_error("no token is left to sample: grammar, logit_bias and samplers have ruled out all");
    }
    const int32_t token = array.data[array.selected].id;
    n_left_ = array.size;
    last_ = token;
    if (grammar_) {
        llama_sampler_accept(grammar_.get(), token);
    }
    llama_sampler_accept(chain_.get(), token);
    return token;
}

TokenLogprobs Sampler::sampled_logprobs(int32_t n_top) const {
    if (greedy_) {
        return {0.0f, n_top > 0 ? std::vector<std::pair<int32_t, float>>{{last_, 0.0f}}
                                : std::vector<std::pair<int32_t, float>>{}};
    }
    std::vector<float> logits(static_cast<size_t>(n_vocab_), -INFINITY);
    for (size_t i = 0; i < n_left_; ++i) {
        logits[static_cast<size_t>(candidates_[i].id)] = candidates_[i].logit;
    }
    TokenLogprobs out = token_logprobs(logits.data(), n_vocab_, last_, n_top);
    const auto ruled_out = [](const std::pair<int32_t, float> & top) { return top.second == -INFINITY; };
    out.top.erase(std::remove_if(out.top.begin(), out.top.end(), ruled_out), out.top.end());
    return out;
}

}  // namespace dspine
