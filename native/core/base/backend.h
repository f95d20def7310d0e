// ggml's devices behind owners: choose one, start it with the right number of threads, allocate on it.
#pragma once

#include <memory>
#include <string>

#include "ggml-cpp.h"

namespace dspine {

struct Backend {
    ggml_backend_ptr handle;
    bool is_cpu = false;
    bool planned = false;  // nothing is really allocated, only its size is known
    int n_threads = 1;

    ggml_backend_t get() const { return handle.get(); }
    std::string name() const;
};

// One per physical core.
int default_threads();

// Starts `device`; n_threads matters on CPU devices only. Throws BackendError.
Backend start_backend(ggml_backend_dev_t device, int n_threads);

// A tensor context without data. Throws BackendError when out of memory.
ggml_context_ptr make_context(size_t n_tensors);

// Allocates every tensor of ctx on the backend, or, where it is planned, gives them a buffer of no bytes. Throws
// BackendError that says how much `what` needed.
ggml_backend_buffer_ptr allocate(ggml_context * ctx, const Backend & backend, const std::string & what);

// Bytes that `allocate` takes, or would take.
size_t allocated_bytes(ggml_context * ctx, ggml_backend_buffer_t buffer, const Backend & backend);

// Bytes on a device, for one purpose.
struct MemoryUse {
    std::string device;
    std::string part;  // weights, cache, compute, output
    size_t n_bytes;
};

}  // namespace dspine
