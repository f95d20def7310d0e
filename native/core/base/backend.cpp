#include "base/backend.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <thread>

#include "base/errors.h"

namespace dspine {

std::string Backend::name() const {
    return ggml_backend_name(handle.get());
}

int default_threads() {
    const int n_logical = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    // Two threads of one core share its arithmetic units: one each is faster. Linux names each core's threads.
    std::set<std::string> cores;
    for (int cpu = 0; cpu < n_logical; ++cpu) {
        std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        std::string siblings;
        if (!std::getline(file, siblings)) {
            return n_logical;
        }
        cores.insert(siblings);
    }
    return static_cast<int>(cores.size());
}

Backend start_backend(ggml_backend_dev_t device, int n_threads) {
    Backend backend;
    backend.handle.reset(ggml_backend_dev_init(device, nullptr));
    if (!backend.handle) {
        throw BackendError("device '" + std::string(ggml_backend_dev_name(device)) + "' could not be started");
    }
    backend.is_cpu = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
    backend.n_threads = n_threads > 0 ? n_threads : default_threads();
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    if (auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
            ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"))) {
        set_threads(backend.get(), backend.n_threads);
    }
    return backend;
}

ggml_context_ptr make_context(size_t n_tensors) {
    ggml_context_ptr ctx(ggml_init({n_tensors * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    if (!ctx) {
        throw BackendError("out of memory for " + std::to_string(n_tensors) + " tensor headers");
    }
    return ctx;
}

ggml_backend_buffer_ptr allocate(ggml_context * ctx, const Backend & backend, const std::string & what) {
    ggml_backend_buffer_type_t type = ggml_backend_get_default_buffer_type(backend.get());
    if (backend.planned) {
        ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(type, 0));
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t != nullptr; t = ggml_get_next_tensor(ctx, t)) {
            t->buffer = empty.get();  // graphs then take the tensor as allocated
        }
        return empty;
    }
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx, backend.get()));
    if (!buffer) {
        const size_t need = ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, type);
        throw BackendError("device '" + backend.name() + "' has no room for " + what + " (" +
                           std::to_string(need / (1024 * 1024) + 1) + " MiB)");
    }
    return buffer;
}

size_t allocated_bytes(ggml_context * ctx, ggml_backend_buffer_t buffer, const Backend & backend) {
    return backend.planned ? ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, ggml_backend_buffer_get_type(buffer))
                           : ggml_backend_buffer_get_size(buffer);
}

}  // namespace dspine
