// Pieces that the commit and the draft graph share. Included by the two graph builders only.
#pragma once

#include "drafter/drafter_graph.h"

namespace dspine {

class LayerOps {
  public:
    LayerOps(ggml_context * ctx, const DrafterConfig & config) : ctx_(ctx), c_(config) {}

    ggml_tensor * norm(ggml_tensor * x, ggml_tensor * weight) const {
        return ggml_mul(ctx_, ggml_rms_norm(ctx_, x, c_.rms_eps), weight);
    }

    // x: F32 [head_dim, n_heads, n]
    ggml_tensor * norm_rope(ggml_tensor * x, ggml_tensor * weight, ggml_tensor * positions) const {
        const RopeConfig & r = c_.rope;
        return ggml_rope_ext(ctx_, norm(x, weight), positions, nullptr, r.n_dims, GGML_ROPE_TYPE_NEOX, r.n_ctx_orig,
                             r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow);
    }

    // Heads [first, first + n_heads) of stacked projections x [n_out, n], as [head_dim, n_heads, n].
    ggml_tensor * heads(ggml_tensor * x, int64_t first, int64_t n_heads) const {
        const size_t head_bytes = static_cast<size_t>(c_.head_dim) * sizeof(float);
        return ggml_view_3d(ctx_, x, c_.head_dim, n_heads, x->ne[1], head_bytes, x->nb[1],
                            static_cast<size_t>(first) * head_bytes);
    }

    // Writes k, v [head_dim, n_head_kv, n] into the cache rows of layer il.
    void store(ggml_cgraph * graph, const DrafterCache & cache, int il, ggml_tensor * k, ggml_tensor * v,
               ggml_tensor * rows) const {
        ggml_build_forward_expand(graph, ggml_set_rows(ctx_, cache.k(il), flat(k), rows));
        ggml_build_forward_expand(graph, ggml_set_rows(ctx_, cache.v(il), flat(v), rows));
    }

  private:
    ggml_tensor * flat(ggml_tensor * x) const {
        return ggml_view_2d(ctx_, x, x->ne[0] * x->ne[1], x->ne[2], x->nb[2], 0);
    }

    ggml_context * ctx_;
    const DrafterConfig & c_;
};

inline ggml_tensor * new_input(ggml_context * ctx, ggml_type type, const char * name, int64_t ne0, int64_t ne1 = 1) {
    ggml_tensor * t = ne1 == 1 ? ggml_new_tensor_1d(ctx, type, ne0) : ggml_new_tensor_2d(ctx, type, ne0, ne1);
    ggml_set_name(t, name);
    ggml_set_input(t);
    return t;
}

}  // namespace dspine
