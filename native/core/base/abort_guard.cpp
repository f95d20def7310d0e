#include "base/abort_guard.h"

#include <cstdio>
#include <mutex>

#include "base/errors.h"
#include "ggml.h"

namespace dspine {
namespace {

thread_local int t_guards = 0;
ggml_abort_callback_t g_previous = nullptr;
std::once_flag g_installed;

// ggml aborts when this returns.
void on_abort(const char * message) {
    if (t_guards > 0) {
        throw BackendError(message);
    }
    if (g_previous != nullptr) {
        g_previous(message);
    } else {
        fprintf(stderr, "%s\n", message);
    }
}

}  // namespace

AbortGuard::AbortGuard() {
    std::call_once(g_installed, [] { g_previous = ggml_set_abort_callback(on_abort); });
    ++t_guards;
}

AbortGuard::~AbortGuard() {
    --t_guards;
}

}  // namespace dspine
