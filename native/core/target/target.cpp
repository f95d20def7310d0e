#include "target/target.h"

#include <algorithm>
#include <cstring>

#include "base/abort_guard.h"
#include "base/check.h"
#include "base/devices.h"
#include "base/errors.h"
#include "base/log.h"
#include "target/llama_internal.h"
#include "target/target_header.h"

namespace dspine {
namespace {

// Architectures that give their layers' inputs in the pinned llama.cpp (t_layer_inp in its src/models), and whose
// embedding and output matrix are used as they are: no scaling, no hyper-connections.
constexpr const char * TAPPED_ARCHS[] = {"llama",          "qwen3",      "qwen3moe",   "qwen3next", "qwen35",
                                         "qwen35moe",      "lfm2",       "lfm2moe",    "gpt-oss",   "nemotron_h",
                                         "nemotron_h_moe", "minimax-01", "minimax-m2", "mimo2",     "hunyuan_vl",
                                         "bailingmoe3",    "nanbeige"};

// llama.cpp keeps a whole tail of every sequence in one graph and aborts when it does not fit.
constexpr int32_t UBATCH_TAIL = 2;

bool is_readable(const ggml_tensor * t) {
    if (ggml_backend_buffer_is_host(t->buffer)) {
        return true;
    }
    // A CPU buffer that is not plain host memory holds a repacked layout; its rows cannot be read.
    ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(t->buffer));
    return device != nullptr && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU;
}

ggml_backend_dev_t device_of(const ggml_tensor * t) {
    ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(t->buffer));
    return device != nullptr && !ggml_backend_buffer_is_host(t->buffer) ? device : cpu_device();
}

std::string meta(const llama_model * model, const char * key) {
    char buffer[256];
    return llama_model_meta_val_str(model, key, buffer, sizeof(buffer)) < 0 ? "" : buffer;
}

}  // namespace

Target::Target(const std::string & path, const TargetOptions & options) : path_(path), options_(options) {
    check_options(options_);
    last_decoded_.resize(static_cast<size_t>(options_.n_seq), 0);
    check_target_header(GgufFile(path));  // a missing or damaged file shows here, with a better message
    options_.n_threads = options_.n_threads > 0 ? options_.n_threads : default_threads();
    options_.n_threads_batch = options_.n_threads_batch > 0 ? options_.n_threads_batch : options_.n_threads;

    const LogScope log;
    const ModelParams model_params(options_);
    const AbortGuard guard;  // llama.cpp asserts some of what the file says
    model_.reset(llama_model_load_from_file(path.c_str(), model_params.get()), llama_model_deleter());
    if (!model_) {
        throw ModelFormatError("llama.cpp could not load '" + path + "'" + log.reason());
    }
    arch_ = meta(model_.get(), "general.architecture");
    recurrent_ = llama_model_is_recurrent(model_.get()) || llama_model_is_hybrid(model_.get());
    if (llama_model_has_encoder(model_.get()) || !llama_model_has_decoder(model_.get())) {
        throw ModelFormatError("'" + path + "' (architecture '" + arch_ + "') is not a decoder-only language model");
    }
    if (options_.n_ctx == 0) {
        const int64_t n_ctx = int64_t{llama_model_n_ctx_train(model_.get())} * options_.n_seq;
        need_range("n_ctx as trained, of all sequences together", n_ctx, 2 * options_.n_seq, MAX_POSITIONS);
        options_.n_ctx = static_cast<int32_t>(n_ctx);
    }

    n_ctx_seq_ = options_.n_ctx / options_.n_seq;
    options_.n_batch = std::max(options_.n_batch, options_.n_seq * (options_.n_rollback + 1));
    options_.n_ubatch = std::max(options_.n_ubatch, options_.n_rollback + UBATCH_TAIL);
    ctx_.reset(llama_init_from_model(model_.get(), context_params(options_, n_outputs_max(), recurrent_)));
    if (!ctx_) {
        throw BackendError("llama.cpp could not make a context of " + std::to_string(options_.n_ctx) +
                           " positions for '" + path + "'" + log.reason());
    }
    graph_splits_ = log.graph_splits();
    n_ctx_seq_ = std::min(n_ctx_seq_, static_cast<int32_t>(llama_n_ctx_seq(ctx_.get())));
    n_rollback_ = static_cast<int32_t>(llama_n_rs_seq(ctx_.get()));
    load_tensors();
}

void Target::load_tensors() {
    tensors_ = std::make_shared<TargetTensors>();
    tensors_->owners.push_back(model_);
    tensors_->arch = arch_;
    tensors_->n_layer = llama_model_n_layer(model_.get());
    tensors_->n_embd = llama_model_n_embd(model_.get());
    tensors_->n_vocab = n_vocab();
    tensors_->planned = options_.planned;
    ggml_tensor * output = nullptr;
    ggml_tensor * tied = nullptr;  // the copy of a tied embedding that llama.cpp multiplies with
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model_.get())) {
        if (name == "output.weight") {
            output = tensor;
        } else if (name == "token_embd.weight") {
            if (tensors_->token_embd == nullptr && is_readable(tensor)) {
                tensors_->token_embd = tensor;
            }
            tied = tied == nullptr || is_cpu(device_of(tied)) ? tensor : tied;
        }
    }
    tensors_->output = output != nullptr ? output : tied;
    if (tensors_->token_embd == nullptr || tensors_->output == nullptr) {
        throw BackendError("'" + path_ + "' has no token embedding or output matrix that a drafter could share");
    }
    tensors_->device = device_of(tensors_->output);
    if (is_readable(tensors_->output)) {
        tensors_->output_rows = tensors_->output;
    } else if (output == nullptr) {
        tensors_->output_rows = tensors_->token_embd;
    } else {
        const auto mapped = std::make_shared<const MappedTensor>(path_, "output.weight");
        tensors_->output_rows = mapped->tensor();
        tensors_->owners.push_back(mapped);
    }
}

void Target::enable_taps(const std::vector<int32_t> & layers) {
    if (std::none_of(std::begin(TAPPED_ARCHS), std::end(TAPPED_ARCHS), [&](const char * a) { return arch_ == a; })) {
        std::string known;
        for (const char * arch : TAPPED_ARCHS) {
            known += (known.empty() ? "" : ", ") + std::string(arch);
        }
        throw PairingError("targets of architecture '" + arch_ +
                           "' cannot be tapped by this version of llama.cpp; those that can: " + known);
    }
    const int32_t n_layer = llama_model_n_layer(model_.get());
    for (const int32_t lid : layers) {
        if (lid < 0 || lid >= n_layer) {
            throw PairingError("the drafter taps the input of layer " + std::to_string(lid) +
                               ", but the target's layers are 0 to " + std::to_string(n_layer - 1));
        }
    }
    for (const int32_t lid : tap_layers_) {
        llama_set_embeddings_layer_inp(ctx_.get(), static_cast<uint32_t>(lid), false);
    }
    for (const int32_t lid : layers) {
        llama_set_embeddings_layer_inp(ctx_.get(), static_cast<uint32_t>(lid), true);
    }
    tap_layers_ = layers;
    tapped_ = false;
}

void Target::need_rollback(int32_t n) const {
    if (recurrent_ && n_rollback_ < n) {
        throw PairingError("the target (architecture '" + arch_ + "') has recurrent layers and can be cut back by " +
                           std::to_string(n_rollback_) + " tokens here, drafting needs " + std::to_string(n) +
                           (options_.n_rollback >= n ? ": this version of llama.cpp keeps no snapshots for it" : ""));
    }
}

void Target::check_batch(const std::vector<BatchToken> & batch) const {
    if (options_.planned) {
        throw std::invalid_argument("the target is only planned: it has no weights");
    }
    if (batch.empty() || batch.size() > static_cast<size_t>(options_.n_batch)) {
        throw std::invalid_argument("a batch of " + std::to_string(batch.size()) + " tokens, expected 1 to " +
                                    std::to_string(options_.n_batch));
    }
    std::vector<int32_t> next(static_cast<size_t>(options_.n_seq), -1);
    int32_t n_outputs = 0;
    for (const BatchToken & t : batch) {
        check_seq(t.seq);
        if (t.token < 0 || t.token >= n_vocab()) {
            throw std::invalid_argument("token " + std::to_string(t.token) + " is outside the vocabulary of " +
                                        std::to_string(n_vocab()));
        }
        int32_t & expected = next[static_cast<size_t>(t.seq)];
        expected = expected < 0 ? length(t.seq) : expected;
        if (t.pos != expected || t.pos >= n_ctx_seq_) {
            throw std::invalid_argument("position " + std::to_string(t.pos) + " of sequence " + std::to_string(t.seq) +
                                        ", expected " + std::to_string(expected) + " below " +
                                        std::to_string(n_ctx_seq_));
        }
        ++expected;
        n_outputs += t.output ? 1 : 0;
    }
    if (n_outputs > n_outputs_max()) {
        throw std::invalid_argument("logits of " + std::to_string(n_outputs) +
                                    " rows wanted, the target was made for " + std::to_string(n_outputs_max()));
    }
}

void Target::decode(const std::vector<BatchToken> & batch) {
    check_batch(batch);
    const size_t n = batch.size();
    std::vector<int32_t> tokens(n), positions(n), n_seq_ids(n, 1), seqs(n);
    std::vector<int32_t *> seq_ids(n);
    std::vector<int8_t> outputs(n);
    std::vector<int32_t> lengths(static_cast<size_t>(options_.n_seq));
    std::vector<int32_t> added(lengths.size(), 0);
    for (size_t i = 0; i < n; ++i) {
        tokens[i] = batch[i].token;
        positions[i] = batch[i].pos;
        seqs[i] = batch[i].seq;
        seq_ids[i] = &seqs[i];
        outputs[i] = batch[i].output ? 1 : 0;
        ++added[static_cast<size_t>(batch[i].seq)];
    }
    for (size_t s = 0; s < lengths.size(); ++s) {
        lengths[s] = length(static_cast<int32_t>(s));
    }
    const LogScope log;
    llama_batch raw = {static_cast<int32_t>(n), tokens.data(),  nullptr,       positions.data(),
                       n_seq_ids.data(),        seq_ids.data(), outputs.data()};
    const int32_t status = llama_decode(ctx_.get(), raw);
    n_rows_ = status == 0 ? static_cast<int32_t>(n) : 0;
    tapped_ = status == 0;
    if (status == 0) {
        llama_synchronize(ctx_.get());
    }
    for (size_t s = 0; s < lengths.size(); ++s) {
        last_decoded_[s] = added[s] > 0 ? added[s] : last_decoded_[s];
    }
    if (status != 0) {
        restore(lengths);
        throw BackendError("llama.cpp failed to decode " + std::to_string(n) + " tokens (status " +
                           std::to_string(status) + ")" + log.reason());
    }
}

void Target::restore(const std::vector<int32_t> & lengths) {
    for (int32_t s = 0; s < options_.n_seq; ++s) {
        const int32_t n = lengths[static_cast<size_t>(s)];
        if (length(s) != n) {
            // A decode that broke off may have written some of a recurrent state's snapshots only.
            truncate(s, !recurrent_ && reusable(s, n) == n ? n : 0);
        }
    }
}

const float * Target::logits(int32_t i) const {
    const float * row = i >= 0 && i < n_rows_ ? llama_get_logits_ith(ctx_.get(), i) : nullptr;
    if (row == nullptr) {
        throw BackendError("llama.cpp has no logits for row " + std::to_string(i) + " of the batch");
    }
    return row;
}

int32_t Target::n_outputs_max() const {
    return options_.hidden ? options_.n_batch : options_.n_seq * (options_.n_rollback + 1);
}

const float * Target::hidden() const {
    const float * rows = options_.hidden ? llama_get_embeddings(ctx_.get()) : nullptr;
    if (rows == nullptr) {
        throw std::invalid_argument("the target keeps no hidden states, it was made without `hidden`");
    }
    return rows;
}

const float * Target::taps(size_t t) const {
    if (!tapped_ || t >= tap_layers_.size()) {  // llama.cpp would abort
        throw std::invalid_argument("no features of tap " + std::to_string(t) + ": the last decode kept " +
                                    std::to_string(tapped_ ? tap_layers_.size() : 0) + " taps");
    }
    return llama_get_embeddings_layer_inp(ctx_.get(), static_cast<uint32_t>(tap_layers_.at(t)));
}

void Target::check_seq(int32_t seq) const {
    if (seq < 0 || seq >= options_.n_seq) {
        throw std::invalid_argument("no sequence " + std::to_string(seq) + ", the target has " +
                                    std::to_string(options_.n_seq));
    }
}

int32_t Target::length(int32_t seq) const {
    check_seq(seq);
    return llama_memory_seq_pos_max(llama_get_memory(ctx_.get()), seq) + 1;
}

int32_t Target::reusable(int32_t seq, int32_t n) const {
    const int32_t now = length(seq);
    n = std::clamp(n, 0, now);
    if (!recurrent_ || n == now || n == 0) {
        return n;
    }
    // Snapshots exist only for the tokens of the last decode: cutting deeper is accepted by llama.cpp, and wrong.
    // One token of it must stay.
    const int32_t depth = now - n;
    return depth <= std::min(n_rollback_, last_decoded_[static_cast<size_t>(seq)] - 1) ? n : 0;
}

void Target::truncate(int32_t seq, int32_t n) {
    const int32_t now = length(seq);
    if (n < 0 || n > now || reusable(seq, n) != n) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " of the target has " + std::to_string(now) +
                                    " positions and cannot be cut back to " + std::to_string(n));
    }
    if (n == now) {
        return;
    }
    // Removing everything must not look like a partial rollback to a recurrent memory.
    if (!llama_memory_seq_rm(llama_get_memory(ctx_.get()), seq, n == 0 ? -1 : n, -1)) {
        throw BackendError("llama.cpp refused to cut sequence " + std::to_string(seq) + " back from " +
                           std::to_string(now) + " to " + std::to_string(n));
    }
    last_decoded_[static_cast<size_t>(seq)] = 0;  // a pending rollback allows no second one before the next decode
}

void Target::clear(int32_t seq) {
    truncate(seq, 0);
}

std::vector<int32_t> Target::tokenize(const std::string & text, bool add_special, bool parse_special) const {
    std::vector<int32_t> tokens(text.size() + 8);
    const auto run = [&] {
        return llama_tokenize(vocab(), text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                              static_cast<int32_t>(tokens.size()), add_special, parse_special);
    };
    int32_t n = run();
    if (n < 0) {
        tokens.resize(static_cast<size_t>(-n));
        n = run();
    }
    tokens.resize(static_cast<size_t>(std::max(0, n)));
    return tokens;
}

std::string Target::piece(int32_t token, bool special) const {
    if (token < 0 || token >= n_vocab()) {
        throw std::invalid_argument("token " + std::to_string(token) + " is outside the vocabulary of " +
                                    std::to_string(n_vocab()));
    }
    std::string text(64, '\0');
    const auto run = [&] {
        return llama_token_to_piece(vocab(), token, text.data(), static_cast<int32_t>(text.size()), 0, special);
    };
    int32_t n = run();
    if (n < 0) {
        text.resize(static_cast<size_t>(-n));
        n = run();
    }
    text.resize(static_cast<size_t>(std::max(0, n)));
    return text;
}

}  // namespace dspine
