#include "target/target_options.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/devices.h"
#include "base/matrix_tiles.h"
#include "gguf/quantize.h"

namespace dspine {
namespace {

constexpr int32_t MAX_ROLLBACK = 1023;
constexpr int32_t MAX_BATCH = 1 << 20;

llama_flash_attn_type parse_flash_attn(const std::string & name) {
    if (name == "on") {
        return LLAMA_FLASH_ATTN_TYPE_ENABLED;
    }
    if (name == "off") {
        return LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    if (name == "auto") {
        return LLAMA_FLASH_ATTN_TYPE_AUTO;
    }
    throw std::invalid_argument("unknown flash_attn '" + name + "', expected on, off or auto");
}

llama_split_mode parse_split_mode(const std::string & name) {
    if (name == "none") {
        return LLAMA_SPLIT_MODE_NONE;
    }
    if (name == "layer") {
        return LLAMA_SPLIT_MODE_LAYER;
    }
    throw std::invalid_argument("unknown split_mode '" + name + "', expected layer or none");
}

// Those that llama.cpp takes when none are named.
size_t n_default_devices() {
    size_t n = 0;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        const auto type = ggml_backend_dev_type(ggml_backend_dev_get(i));
        n += type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU ? 1 : 0;
    }
    return n;
}

}  // namespace

void check_options(const TargetOptions & o) {
    need_range("n_ctx", o.n_ctx, 0, MAX_POSITIONS);
    need_range("n_seq", o.n_seq, 1, static_cast<int64_t>(llama_max_parallel_sequences()));
    need_range("n_batch", o.n_batch, 1, MAX_BATCH);
    need_range("n_ubatch", o.n_ubatch, 1, MAX_BATCH);
    need_range("n_rollback", o.n_rollback, 0, MAX_ROLLBACK);
    need_range("n_snapshots", o.n_snapshots, -1, o.planned ? MAX_ROLLBACK : -1);
    need_range("n_threads", o.n_threads, 0, MAX_THREADS);
    need_range("n_threads_batch", o.n_threads_batch, 0, MAX_THREADS);
    if (o.n_ctx > 0 && o.n_ctx / o.n_seq < 2) {
        throw std::invalid_argument("n_ctx = " + std::to_string(o.n_ctx) +
                                    " leaves less than two positions for each of " + std::to_string(o.n_seq) +
                                    " sequences");
    }
    const bool shares_are_numbers =
        std::all_of(o.tensor_split.begin(), o.tensor_split.end(), [](float x) { return std::isfinite(x) && x >= 0; });
    if (!o.tensor_split.empty() &&
        (!shares_are_numbers || std::accumulate(o.tensor_split.begin(), o.tensor_split.end(), 0.0F) <= 0)) {
        throw std::invalid_argument("tensor_split must be shares of 0 and more, one at least above 0");
    }
    const size_t n_devices = o.devices ? o.devices->size() : n_default_devices();
    if (o.tensor_split.size() > std::max<size_t>(n_devices, 1) || o.tensor_split.size() > llama_max_devices()) {
        throw std::invalid_argument("tensor_split has " + std::to_string(o.tensor_split.size()) +
                                    " shares, expected at most one for each of " + std::to_string(n_devices) +
                                    " devices");
    }
}

ModelParams::ModelParams(const TargetOptions & o) : params_(llama_model_default_params()) {
    params_.n_gpu_layers = o.n_gpu_layers;
    params_.load_mode = o.use_mmap && !o.planned ? LLAMA_LOAD_MODE_AUTO : LLAMA_LOAD_MODE_NONE;
    params_.no_alloc = o.planned;
    params_.use_extra_bufts = cpu_layouts_work();
    params_.split_mode = parse_split_mode(o.split_mode);
    if (o.devices) {
        for (const std::string & name : *o.devices) {
            ggml_backend_dev_t device = find_device(name);
            if (is_cpu(device)) {
                throw std::invalid_argument("device '" + name +
                                            "' is the CPU, which holds what no other device does; 'none' alone names "
                                            "no other device");
            }
            if (std::find(devices_.begin(), devices_.end(), device) != devices_.end()) {
                throw std::invalid_argument("device '" + name + "' is named twice");
            }
            devices_.push_back(device);
        }
        devices_.push_back(nullptr);
        params_.devices = devices_.data();
    }
    if (!o.tensor_split.empty()) {
        tensor_split_ = o.tensor_split;
        tensor_split_.resize(std::max(tensor_split_.size(), llama_max_devices()), 0.0F);
        params_.tensor_split = tensor_split_.data();
    }
}

llama_context_params context_params(const TargetOptions & o, int32_t n_outputs, bool recurrent) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>(o.n_ctx / o.n_seq * o.n_seq);
    params.n_seq_max = static_cast<uint32_t>(o.n_seq);
    params.kv_unified = false;
    params.swa_full = true;  // a pruned window could not be cut back
    const int32_t n_snapshots = o.n_snapshots < 0 ? o.n_rollback : o.n_snapshots;
    params.n_rs_seq = recurrent ? static_cast<uint32_t>(n_snapshots) : 0;
    params.n_batch = static_cast<uint32_t>(o.n_batch);
    params.n_ubatch = static_cast<uint32_t>(o.n_ubatch);
    params.n_outputs_max = static_cast<uint32_t>(n_outputs);
    params.embeddings = o.hidden;
    params.pooling_type = o.hidden ? LLAMA_POOLING_TYPE_NONE : params.pooling_type;
    params.n_threads = o.n_threads;
    params.n_threads_batch = o.n_threads_batch;
    params.flash_attn_type = parse_flash_attn(o.flash_attn);
    params.type_k = parse_type(o.cache_type_k);
    params.type_v = parse_type(o.cache_type_v);
    params.no_perf = true;
    return params;
}

}  // namespace dspine
