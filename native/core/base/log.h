// ggml and llama.cpp explain failures only in their log. This keeps the last error lines for our exceptions,
// and passes the rest to stderr when verbose. Installed once by native/bindings/, and again by whoever is about to
// load.
#pragma once

#include <string>
#include <utility>

namespace dspine {

void install_log_sink();
void set_log_verbose(bool verbose);

// Remembers what is logged as an error by this thread from construction on.
class LogScope {
  public:
    LogScope();
    // "; llama.cpp says: ..." or an empty string.
    std::string reason() const;
    // Parts that ggml's scheduler cut a context's graphs into, of a prompt and of one token, if one was made since;
    // there is no other way to ask. -1: not told.
    std::pair<int, int> graph_splits() const;
};

}  // namespace dspine
