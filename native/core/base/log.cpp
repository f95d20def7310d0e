#include "base/log.h"

#include <atomic>
#include <cstdio>
#include <cstring>

#include "llama.h"

namespace dspine {
namespace {

constexpr size_t MAX_REASON = 1000;
constexpr const char * SPLITS = ", splits = ";  // llama_context::sched_reserve

std::atomic<bool> g_verbose{false};
thread_local std::string t_errors;
thread_local std::string t_graphs;                          // the line about a context's graphs
thread_local ggml_log_level t_level = GGML_LOG_LEVEL_NONE;  // of the line that GGML_LOG_LEVEL_CONT continues

void sink(ggml_log_level level, const char * text, void *) {
    if (level != GGML_LOG_LEVEL_CONT) {
        t_level = level;
    }
    if (t_level == GGML_LOG_LEVEL_ERROR && t_errors.size() < MAX_REASON) {
        t_errors += text;
    }
    if (std::strstr(text, SPLITS) != nullptr) {
        t_graphs = text;
    }
    if (g_verbose) {
        fputs(text, stderr);
    }
}

}  // namespace

void install_log_sink() {
    llama_log_set(sink, nullptr);
}

void set_log_verbose(bool verbose) {
    g_verbose = verbose;
}

LogScope::LogScope() {
    install_log_sink();  // importing llama_cpp installs its own
    t_errors.clear();
    t_graphs.clear();
}

std::pair<int, int> LogScope::graph_splits() const {
    const size_t at = t_graphs.find(SPLITS);
    int prompt = -1;
    int token = -1;
    if (at == std::string::npos) {
        return {-1, -1};
    }
    const int n = std::sscanf(t_graphs.c_str() + at, ", splits = %d / %d", &prompt, &token);
    return {prompt, n == 2 ? token : prompt};
}

std::string LogScope::reason() const {
    std::string text = t_errors;
    while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) {
        text.pop_back();
    }
    for (char & c : text) {
        if (c == '\n') {
            c = ' ';
        }
    }
    return text.empty() ? "" : "; llama.cpp says: " + text;
}

}  // namespace dspine
