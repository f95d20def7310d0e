// How a target is loaded, and what llama.cpp is told of it. Called by target.cpp only; the engine fills the options in.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "llama.h"

namespace dspine {

struct TargetOptions {
    int32_t n_ctx = 4096;    // positions of all sequences together, as in llama.cpp; 0: what the model was trained for
    int32_t n_seq = 1;       // sequences that share it evenly
    int32_t n_batch = 512;   // tokens of one decode call at most
    int32_t n_ubatch = 512;  // tokens of one graph at most
    int32_t n_rollback = 0;  // tokens that a sequence may be cut back by after a decode: the longest draft
    int32_t n_gpu_layers = -1;  // all
    int32_t n_threads = 0;      // 0: as many as there are cores
    int32_t n_threads_batch = 0;
    std::string flash_attn = "auto";  // on, off, auto
    std::string cache_type_k = "f16";
    std::string cache_type_v = "f16";
    bool use_mmap = true;
    bool hidden = false;   // keep every row's final hidden state; every row is then an output
    bool planned = false;  // allocate nothing, to ask for `memory` only
    // When planned: snapshots of a recurrent state, -1 is as many as n_rollback. llama.cpp allocates these even then.
    int32_t n_snapshots = -1;
    std::optional<std::vector<std::string>> devices;  // names, none beside the CPU when empty; llama.cpp's choice
    std::string split_mode = "layer";                 // layer, or none: all on the first device
    std::vector<float> tensor_split;                  // shares of the devices, in their order
};

// Throws std::invalid_argument, naming what was found and what was expected.
void check_options(const TargetOptions & options);

// llama.cpp's parameters, with the arrays that they point to.
class ModelParams {
  public:
    // Throws std::invalid_argument for devices that do not exist.
    explicit ModelParams(const TargetOptions & options);
    ModelParams(const ModelParams &) = delete;
    ModelParams & operator=(const ModelParams &) = delete;

    const llama_model_params & get() const { return params_; }

  private:
    std::vector<ggml_backend_dev_t> devices_;
    std::vector<float> tensor_split_;
    llama_model_params params_;
};

// For a context of n_outputs rows of logits at most. Sizes and threads must be resolved.
llama_context_params context_params(const TargetOptions & options, int32_t n_outputs, bool recurrent);

}  // namespace dspine
