// A sequence's state as bytes and back, by llama.cpp's own format. Called by the engine
// (slot_state.cpp, prefix_reuse.cpp).
#include "base/abort_guard.h"
#include "base/errors.h"
#include "base/log.h"
#include "target/target.h"

namespace dspine {

std::string Target::save_state(int32_t seq) const {
    const LogScope log;
    std::string state(llama_state_seq_get_size(ctx_.get(), seq), '\0');
    const size_t n = llama_state_seq_get_data(ctx_.get(), reinterpret_cast<uint8_t *>(state.data()), state.size(), seq);
    if (n == 0 || n != state.size()) {
        throw BackendError("llama.cpp could not save the state of sequence " + std::to_string(seq) + log.reason());
    }
    return state;
}

void Target::load_state(int32_t seq, const std::string & state, int32_t n) {
    const LogScope log;
    const AbortGuard guard;
    const llama_memory_t memory = llama_get_memory(ctx_.get());
    const auto empty = [&] { llama_memory_seq_rm(memory, seq, -1, -1); };  // whatever positions a bad state left
    empty();
    const size_t n_read =
        state.empty()
            ? 0
            : llama_state_seq_set_data(ctx_.get(), reinterpret_cast<const uint8_t *>(state.data()), state.size(), seq);
    last_decoded_[static_cast<size_t>(seq)] = 0;  // a state holds no snapshots
    const bool from_start = recurrent_ || llama_memory_seq_pos_min(memory, seq) == 0;
    if (n_read == state.size() && n_read > 0 && length(seq) == n && from_start) {
        return;
    }
    empty();
    throw ModelFormatError("the saved state does not fit: llama.cpp read " + std::to_string(n_read) + " of " +
                           std::to_string(state.size()) + " bytes, expected " + std::to_string(n) + " positions" +
                           log.reason());
}

std::string Target::save_recurrent(int32_t seq) const {
    const LogScope log;
    const auto flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    std::string state(llama_state_seq_get_size_ext(ctx_.get(), seq, flags), '\0');
    uint8_t * data = reinterpret_cast<uint8_t *>(state.data());
    if (state.empty() || llama_state_seq_get_data_ext(ctx_.get(), data, state.size(), seq, flags) != state.size()) {
        throw BackendError("llama.cpp could not save the recurrent state of sequence " + std::to_string(seq) +
                           log.reason());
    }
    return state;
}

void Target::load_recurrent(int32_t seq, const std::string & state, int32_t n) {
    const LogScope log;
    const llama_memory_t memory = llama_get_memory(ctx_.get());
    const uint8_t * data = reinterpret_cast<const uint8_t *>(state.data());
    const size_t n_read =
        llama_state_seq_set_data_ext(ctx_.get(), data, state.size(), seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    last_decoded_[static_cast<size_t>(seq)] = 0;  // a state holds no snapshots
    // The attention's positions behind it: the recurrent part has none there, so nothing is rolled back.
    if (n_read == state.size() && llama_memory_seq_rm(memory, seq, n, -1) && length(seq) == n) {
        return;
    }
    llama_memory_seq_rm(memory, seq, -1, -1);
    throw BackendError("llama.cpp could not put back the recurrent state of sequence " + std::to_string(seq) + " at " +
                       std::to_string(n) + " positions" + log.reason());
}

}  // namespace dspine
