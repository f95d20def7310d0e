// A sequence of the drafter's cache as bytes and back: positions in order, whatever the rings' size.
#include <algorithm>
#include <cstring>

#include "base/errors.h"
#include "drafter/drafter.h"

namespace dspine {
namespace {

// What precedes the rows. Rows of a full layer begin at position 0, those of a sliding layer at `oldest`.
struct StateHeader {
    int32_t type;
    int32_t n_layer;
    int32_t n_embd_kv;
    int32_t length;
    int32_t oldest;
};

}  // namespace

// Calls f(row, n) for runs of consecutive rows that hold positions [first, end).
template <typename F>
void DrafterCache::for_runs(LayerKind kind, int32_t seq, int32_t first, int32_t end, F f) const {
    while (first < end) {
        const int64_t ring_left = n_cells(kind) - first % n_cells(kind);
        const int32_t n = static_cast<int32_t>(std::min<int64_t>(ring_left, end - first));
        f(row(kind, seq, first), n);
        first += n;
    }
}

std::string DrafterCache::save(int32_t seq) const {
    const Sequence & s = seqs_[static_cast<size_t>(seq)];
    const StateHeader header = {static_cast<int32_t>(k_[0]->type), static_cast<int32_t>(k_.size()),
                                static_cast<int32_t>(k_[0]->ne[0]), s.length, s.oldest};
    std::string out(reinterpret_cast<const char *>(&header), sizeof(header));
    for (size_t il = 0; il < k_.size(); ++il) {
        const LayerKind layer = kind(static_cast<int>(il));
        for (const ggml_tensor * t : {k_[il], v_[il]}) {
            for_runs(layer, seq, layer == LayerKind::full ? 0 : s.oldest, s.length, [&](int64_t first, int32_t n) {
                const size_t at = out.size();
                const size_t n_bytes = static_cast<size_t>(n) * t->nb[1];
                out.resize(at + n_bytes);
                ggml_backend_tensor_get(t, out.data() + at, static_cast<size_t>(first) * t->nb[1], n_bytes);
            });
        }
    }
    return out;
}

void DrafterCache::load(int32_t seq, const std::string & state) {
    StateHeader header;
    const auto fail = [](const std::string & what) {
        throw ModelFormatError("the drafter's saved state does not fit: " + what);
    };
    if (state.size() < sizeof(header)) {
        fail("it ends inside its header");
    }
    std::memcpy(&header, state.data(), sizeof(header));
    if (header.type != static_cast<int32_t>(k_[0]->type) || header.n_layer != static_cast<int32_t>(k_.size()) ||
        header.n_embd_kv != static_cast<int32_t>(k_[0]->ne[0])) {
        fail("its layers, width or type are not this drafter's");
    }
    if (header.length < 0 || header.length > n_ctx_ || header.oldest < 0 || header.oldest > header.length) {
        fail(std::to_string(header.length) + " positions, expected at most " + std::to_string(n_ctx_));
    }
    const auto saved_from = [&](LayerKind layer) { return layer == LayerKind::full ? 0 : header.oldest; };
    size_t n_expected = sizeof(header);
    for (size_t il = 0; il < k_.size(); ++il) {
        n_expected += static_cast<size_t>(header.length - saved_from(kind(static_cast<int>(il)))) *
                      (k_[il]->nb[1] + v_[il]->nb[1]);
    }
    if (state.size() != n_expected) {
        fail(std::to_string(state.size()) + " bytes, expected " + std::to_string(n_expected));
    }
    Sequence & s = seqs_[static_cast<size_t>(seq)];
    s.length = header.length;
    // A ring of this cache may be smaller than the one that was saved.
    s.oldest = std::max(header.oldest, static_cast<int32_t>(header.length - n_cells(LayerKind::sliding)));
    size_t at = sizeof(header);
    for (size_t il = 0; il < k_.size(); ++il) {
        const LayerKind layer = kind(static_cast<int>(il));
        const int32_t first_kept = layer == LayerKind::full ? 0 : s.oldest;
        for (ggml_tensor * t : {k_[il], v_[il]}) {
            at += static_cast<size_t>(first_kept - saved_from(layer)) * t->nb[1];
            for_runs(layer, seq, first_kept, s.length, [&](int64_t first, int32_t n) {
                const size_t n_bytes = static_cast<size_t>(n) * t->nb[1];
                ggml_backend_tensor_set(t, state.data() + at, static_cast<size_t>(first) * t->nb[1], n_bytes);
                at += n_bytes;
            });
        }
    }
}

std::string Drafter::save(int32_t seq) const {
    check_seq(seq);
    return cache_->save(seq);
}

void Drafter::load(int32_t seq, const std::string & state) {
    check_seq(seq);
    cache_->load(seq, state);
}

}  // namespace dspine
