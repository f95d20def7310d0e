#include "base/matrix_tiles.h"

#if defined(__linux__) && defined(__x86_64__)
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

namespace dspine {
namespace {

constexpr int64_t SIZE = 64;  // of both matrices: whole tiles, and more than one
constexpr int WAIT_MS = 5000;

ggml_backend_buffer_type_t tile_layout() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu == nullptr) {
        return nullptr;
    }
    const auto extra_layouts = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
    if (extra_layouts == nullptr) {
        return nullptr;
    }
    for (ggml_backend_buffer_type_t * layout = extra_layouts(cpu); layout != nullptr && *layout != nullptr; ++layout) {
        if (std::strcmp(ggml_backend_buft_name(*layout), "AMX") == 0) {
            return *layout;
        }
    }
    return nullptr;
}

// A product of ones. One thread: a forked child has no others.
bool multiplies(ggml_backend_buffer_type_t layout) {
    const ggml_init_params params = {16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true};
    const ggml_context_ptr weights(ggml_init(params));
    const ggml_context_ptr ctx(ggml_init(params));
    const ggml_backend_ptr backend(ggml_backend_cpu_init());
    if (!weights || !ctx || !backend) {
        return false;
    }
    ggml_backend_cpu_set_n_threads(backend.get(), 1);
    ggml_tensor * w = ggml_new_tensor_2d(weights.get(), GGML_TYPE_Q8_0, SIZE, SIZE);
    ggml_tensor * x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, SIZE, SIZE);
    ggml_tensor * y = ggml_mul_mat(ctx.get(), w, x);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, y);
    const ggml_backend_buffer_ptr weight_buffer(ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), layout));
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    if (!weight_buffer || !buffer) {
        return false;
    }
    std::vector<float> values(SIZE * SIZE, 1.0F);
    std::vector<char> rows(ggml_nbytes(w));
    ggml_quantize_chunk(GGML_TYPE_Q8_0, values.data(), rows.data(), 0, SIZE, SIZE, nullptr);
    ggml_backend_tensor_set(w, rows.data(), 0, rows.size());
    ggml_backend_tensor_set(x, values.data(), 0, values.size() * sizeof(float));
    if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
        return false;
    }
    ggml_backend_tensor_get(y, values.data(), 0, values.size() * sizeof(float));
    for (const float value : values) {
        if (!(std::fabs(value - static_cast<float>(SIZE)) < 0.5F)) {
            return false;
        }
    }
    return true;
}

bool child_multiplies(ggml_backend_buffer_type_t layout) {
    const pid_t child = fork();
    if (child < 0) {
        return false;
    }
    if (child == 0) {
        for (const int crash : {SIGSEGV, SIGILL, SIGBUS, SIGFPE, SIGABRT}) {
            signal(crash, SIG_DFL);
        }
        const rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
        _exit(multiplies(layout) ? 0 : 1);
    }
    for (int ms = 0; ms < WAIT_MS; ++ms) {
        int status = 0;
        const pid_t ended = waitpid(child, &status, WNOHANG);
        if (ended == child) {
            return WIFEXITED(status) && WEXITSTATUS(status) == 0;
        }
        if (ended < 0 && errno != EINTR) {
            return false;
        }
        const timespec pause = {0, 1000000};
        nanosleep(&pause, nullptr);
    }
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    return false;
}

}  // namespace

bool cpu_layouts_work() {
    static const bool works = [] {
        ggml_backend_buffer_type_t layout = tile_layout();
        return layout == nullptr || child_multiplies(layout);
    }();
    return works;
}

}  // namespace dspine

#else

namespace dspine {

bool cpu_layouts_work() {
    return true;
}

}  // namespace dspine

#endif
