// The bytes of a target, by device and purpose: llama.cpp's own count of its buffers, and its output buffer, which that
// leaves out.
#include <algorithm>
#include <exception>

#include "base/errors.h"
#include "target/llama_internal.h"
#include "target/target.h"

namespace dspine {

std::vector<MemoryUse> Target::memory() {
    try {
        ctx_->sched_reserve();
    } catch (const std::exception & e) {
        throw BackendError("no room for the compute buffers of '" + path_ + "': " + e.what());
    }
    std::vector<MemoryUse> all;
    const auto add = [&](const std::string & device, const char * part, size_t n_bytes) {
        for (MemoryUse & use : all) {
            if (use.device == device && use.part == part) {
                use.n_bytes += n_bytes;
                return;
            }
        }
        if (n_bytes > 0) {
            all.push_back({device, part, n_bytes});
        }
    };
    const std::string cpu = ggml_backend_dev_name(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    for (const auto & [type, bytes] : llama_get_memory_breakdown(ctx_.get())) {
        ggml_backend_dev_t device = ggml_backend_buft_is_host(type) ? nullptr : ggml_backend_buft_get_device(type);
        const std::string name = device == nullptr ? cpu : ggml_backend_dev_name(device);
        add(name, "weights", bytes.model);
        add(name, "cache", bytes.context);
        add(name, "compute", bytes.compute);
    }
    // src/llama-context.cpp, output_reserve: logits of every output row, tapped inputs of every row of a batch.
    const size_t n_batch = std::min<size_t>(static_cast<size_t>(options_.n_batch), llama_n_ctx(ctx_.get()));
    const size_t n_embd = static_cast<size_t>(tensors_->n_embd);
    const size_t n_taps = tap_layers_.size();
    const size_t n_outputs = static_cast<size_t>(n_outputs_max());
    const size_t n_floats = n_outputs * (static_cast<size_t>(n_vocab()) + (options_.hidden ? n_embd : 0));
    add(cpu, "output", (n_floats + n_taps * n_embd * n_batch) * sizeof(float));
    return all;
}

}  // namespace dspine
