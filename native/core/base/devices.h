// Devices by name, as llama.cpp lists them, and those of other machines.
#pragma once

#include <string>
#include <vector>

#include "ggml-backend.h"

namespace dspine {

bool is_cpu(ggml_backend_dev_t device);

// Reached over the network (llama.cpp's RPC backend).
bool is_remote(ggml_backend_dev_t device);

ggml_backend_dev_t cpu_device();

// By name, in any case. Throws std::invalid_argument, naming the devices that exist.
ggml_backend_dev_t find_device(const std::string & name);

// The device for a computation whose main operand lies on `holder`: that one, unless it is remote; then the first
// local device that is made for computing, or the CPU.
ggml_backend_dev_t local_device(ggml_backend_dev_t holder);

// Makes a server's devices known, as host:port. ggml ends the process when it does not answer: check before.
// Throws BackendError when this build has no RPC backend, or the server no device.
void add_rpc_server(const std::string & endpoint);

// Lends devices to other machines at host:port, for as long as the process lives; returns only when it cannot.
// Throws BackendError when this build has no RPC backend, std::invalid_argument for devices that do not exist.
void serve_rpc(const std::string & endpoint, const std::vector<std::string> & devices, int n_threads);

}  // namespace dspine
