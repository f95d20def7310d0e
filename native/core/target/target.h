// The target: a llama.cpp model and its context, with every misuse that llama.cpp would abort on checked first.
// Called by the engine; lends its matrices to the drafter.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gguf/mapped_rows.h"
#include "llama-cpp.h"
#include "target/target_options.h"
#include "target/target_tensors.h"

namespace dspine {

struct BatchToken {
    int32_t token;
    int32_t pos;
    int32_t seq;
    bool output;  // its logits are wanted
};

class Target {
  public:
    // Throws FileNotFound, ModelFormatError, BackendError, std::invalid_argument.
    Target(const std::string & path, const TargetOptions & options);

    const std::string & path() const { return path_; }
    const std::string & arch() const { return arch_; }
    const llama_model * model() const { return model_.get(); }
    const llama_vocab * vocab() const { return llama_model_get_vocab(model_.get()); }
    int32_t n_vocab() const { return llama_vocab_n_tokens(vocab()); }
    int32_t n_ctx_seq() const { return n_ctx_seq_; }
    int32_t n_seq() const { return options_.n_seq; }
    int32_t n_batch() const { return options_.n_batch; }
    int32_t n_threads() const { return options_.n_threads; }
    int32_t n_threads_batch() const { return options_.n_threads_batch; }
    int32_t n_rollback() const { return options_.n_rollback; }
    bool is_recurrent() const { return recurrent_; }

    // target_memory.cpp. What it has, or when planned would have, allocated; with the layers that are tapped now.
    // Throws BackendError when a device has no room.
    std::vector<MemoryUse> memory();

    // The matrices that a drafter shares. Throws BackendError when this build of llama.cpp hides them.
    std::shared_ptr<const TargetTensors> tensors() const { return tensors_; }

    // Keeps the inputs of these layers from every decode on. Throws PairingError for a layer that cannot be tapped.
    void enable_taps(const std::vector<int32_t> & layers);
    // Refuses, with the reason, a target whose memory cannot be cut back by n tokens after a decode.
    void need_rollback(int32_t n) const;

    // Runs the batch. Positions must continue each sequence. On an error the memory is cut back to where it was.
    void decode(const std::vector<BatchToken> & batch);
    // Of the last decode: logits of row i of the batch, float32 [n_vocab]. The row must have been an output.
    const float * logits(int32_t i) const;
    // Of the last decode: final hidden states behind the output norm, float32 [n_rows, n_embd]. Needs `hidden`.
    const float * hidden() const;
    // Rows of the last decode; 0 before the first, and after one that failed.
    int32_t n_rows() const { return n_rows_; }
    // Of the last decode: the tapped rows of tap t, float32 [n_rows, n_embd].
    const float * taps(size_t t) const;

    // Parts that ggml's scheduler cut the graph of a prompt, and that of one token, into: 1 on one device. -1: not
    // known.
    std::pair<int, int> graph_splits() const { return graph_splits_; }

    int32_t length(int32_t seq) const;
    // The longest length up to n that the sequence can be cut back to.
    int32_t reusable(int32_t seq, int32_t n) const;
    void truncate(int32_t seq, int32_t n);
    void clear(int32_t seq);

    // target_state.cpp. A sequence as bytes; its state is replaced by n saved positions, or emptied when they do not
    // fit (ModelFormatError).
    std::string save_state(int32_t seq) const;
    void load_state(int32_t seq, const std::string & state, int32_t n);
    // The part of it that cannot be cut back, nothing where all can. It is put back while the sequence still has the n
    // positions that it was saved at, and cuts it back to these. Throws BackendError; the sequence is then empty.
    std::string save_recurrent(int32_t seq) const;
    void load_recurrent(int32_t seq, const std::string & state, int32_t n);

    std::vector<int32_t> tokenize(const std::string & text, bool add_special, bool parse_special) const;
    std::string piece(int32_t token, bool special) const;

  private:
    int32_t n_outputs_max() const;
    void load_tensors();
    void check_seq(int32_t seq) const;
    void check_batch(const std::vector<BatchToken> & batch) const;
    void restore(const std::vector<int32_t> & lengths);

    std::string path_;
    TargetOptions options_;
    std::string arch_;
    bool recurrent_ = false;
    int32_t n_rollback_ = 0;  // what the context really keeps, recurrent models only
    int32_t n_ctx_seq_ = 0;
    std::pair<int, int> graph_splits_ = {-1, -1};
    std::shared_ptr<llama_model> model_;
    llama_context_ptr ctx_;
    std::shared_ptr<TargetTensors> tensors_;
    std::vector<int32_t> tap_layers_;
    int32_t n_rows_ = 0;
    bool tapped_ = false;                // the last decode kept tap_layers_
    std::vector<int32_t> last_decoded_;  // per sequence, tokens of its last decode that can still be taken back
};

}  // namespace dspine
