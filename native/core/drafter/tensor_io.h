// Whole tensors between host vectors and a device.
#pragma once

#include <vector>

#include "ggml-backend.h"

namespace dspine {

template <typename T>
std::vector<T> download(const ggml_tensor * t) {
    std::vector<T> out(static_cast<size_t>(ggml_nelements(t)));
    ggml_backend_tensor_get(t, out.data(), 0, out.size() * sizeof(T));
    return out;
}

template <typename T>
void upload(ggml_tensor * t, const std::vector<T> & values) {
    ggml_backend_tensor_set(t, values.data(), 0, values.size() * sizeof(T));
}

}  // namespace dspine
