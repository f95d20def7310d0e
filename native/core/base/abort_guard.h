// ggml ends the process when one of its assertions fails, and llama.cpp asserts what a damaged file says.
#pragma once

namespace dspine {

// While one lives, an assertion that fails on its thread throws BackendError: llama.cpp's loaders catch it and report
// a failed load like any other. For loading only, where everything that was begun is thrown away.
class AbortGuard {
  public:
    AbortGuard();
    ~AbortGuard();
    AbortGuard(const AbortGuard &) = delete;
    AbortGuard & operator=(const AbortGuard &) = delete;
};

}  // namespace dspine
