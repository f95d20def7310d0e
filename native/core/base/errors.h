// The exceptions of the core. native/bindings/ maps each to its Python class; see dspine_local/errors.py.
// A wrong argument is std::invalid_argument (ValueError in Python).
#pragma once

#include <stdexcept>
#include <string>

namespace dspine {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A file is not what it should be.
struct ModelFormatError : Error {
    using Error::Error;
};

// A drafter that does not belong to the target.
struct PairingError : Error {
    using Error::Error;
};

// A request that does not fit the context.
struct ContextLengthError : Error {
    using Error::Error;
};

// The device, ggml or llama.cpp refused or failed.
struct BackendError : Error {
    using Error::Error;
};

struct FileNotFound : std::runtime_error {
    explicit FileNotFound(const std::string & path) : std::runtime_error(path) {}
};

}  // namespace dspine
