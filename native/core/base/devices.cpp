#include "base/devices.h"

#include <cstring>

#include "base/backend.h"
#include "base/errors.h"

namespace dspine {
namespace {

constexpr const char * RPC = "RPC";

std::vector<ggml_backend_dev_t> all_devices() {
    std::vector<ggml_backend_dev_t> all;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        all.push_back(ggml_backend_dev_get(i));
    }
    return all;
}

template <typename Function>
Function rpc_function(const char * name) {
    ggml_backend_reg_t rpc = ggml_backend_reg_by_name(RPC);
    void * address = rpc == nullptr ? nullptr : ggml_backend_reg_get_proc_address(rpc, name);
    if (address == nullptr) {
        throw BackendError(
            "this build of llama-cpp-python has no RPC backend, expected one compiled with -DGGML_RPC=ON");
    }
    return reinterpret_cast<Function>(address);
}

}  // namespace

bool is_cpu(ggml_backend_dev_t device) {
    return device == nullptr || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

bool is_remote(ggml_backend_dev_t device) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    return reg != nullptr && std::strcmp(ggml_backend_reg_name(reg), RPC) == 0;
}

ggml_backend_dev_t cpu_device() {
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (device == nullptr) {
        throw BackendError("ggml has no CPU device");
    }
    return device;
}

ggml_backend_dev_t find_device(const std::string & name) {
    ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
    if (device != nullptr) {
        return device;
    }
    std::string known;
    for (ggml_backend_dev_t each : all_devices()) {
        known += (known.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(each));
    }
    throw std::invalid_argument("no device '" + name + "', expected one of: " + known);
}

ggml_backend_dev_t local_device(ggml_backend_dev_t holder) {
    if (!is_remote(holder)) {
        return holder;
    }
    for (ggml_backend_dev_t device : all_devices()) {
        const auto type = ggml_backend_dev_type(device);
        if ((type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU) && !is_remote(device)) {
            return device;
        }
    }
    return cpu_device();
}

void add_rpc_server(const std::string & endpoint) {
    const auto add = rpc_function<ggml_backend_reg_t (*)(const char *)>("ggml_backend_rpc_add_server");
    ggml_backend_reg_t server = add(endpoint.c_str());
    if (server == nullptr) {
        throw BackendError("the RPC server '" + endpoint + "' has no devices");
    }
    ggml_backend_register(server);
}

void serve_rpc(const std::string & endpoint, const std::vector<std::string> & devices, int n_threads) {
    using Serve = void (*)(const char *, const char *, size_t, size_t, ggml_backend_dev_t *);
    const auto serve = rpc_function<Serve>("ggml_backend_rpc_start_server");
    std::vector<ggml_backend_dev_t> lent;
    for (const std::string & name : devices) {
        lent.push_back(find_device(name));
    }
    const int threads = n_threads > 0 ? n_threads : default_threads();
    serve(endpoint.c_str(), nullptr, static_cast<size_t>(threads), lent.size(), lent.data());
}

}  // namespace dspine
