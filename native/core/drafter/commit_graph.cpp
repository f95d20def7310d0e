#include "drafter/drafter_layers.h"

namespace dspine {

CommitGraph build_commit_graph(const DrafterParts & parts, int64_t n_rows) {
    const DrafterConfig & c = parts.config;
    const DrafterWeights & w = parts.weights;
    const size_t n_nodes = 16 + 24 * static_cast<size_t>(c.n_layer);

    CommitGraph g;
    g.ctx.reset(
        ggml_init({n_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false), nullptr, true}));
    ggml_context * ctx = g.ctx.get();
    g.graph = ggml_new_graph_custom(ctx, n_nodes, false);
    const LayerOps ops(ctx, c);

    g.features = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, c.n_taps() * c.n_embd, n_rows);
    ggml_set_input(g.features);
    g.positions = new_input(ctx, GGML_TYPE_I32, "positions", n_rows);
    for (const LayerKind kind : {LayerKind::full, LayerKind::sliding}) {
        if (parts.cache.has(kind)) {
            g.rows[static_cast<int>(kind)] = new_input(ctx, GGML_TYPE_I64, "rows", n_rows);
        }
    }

    ggml_tensor * context = ops.norm(ggml_mul_mat(ctx, w.fc, g.features), w.hidden_norm);  // [D, n]
    for (int il = 0; il < c.n_layer; ++il) {
        const DrafterLayer & layer = w.layers[static_cast<size_t>(il)];
        ggml_tensor * kv_weight =  // the K and V rows of the stacked projections
            ggml_view_2d(ctx, layer.attn_qkv, c.n_embd, 2 * c.n_embd_kv(), layer.attn_qkv->nb[1],
                         static_cast<size_t>(c.n_embd_q()) * layer.attn_qkv->nb[1]);
        ggml_tensor * kv = ggml_mul_mat(ctx, kv_weight, context);  // [2 * n_embd_kv, n]
        ggml_tensor * k = ops.norm_rope(ops.heads(kv, 0, c.n_head_kv), layer.attn_k_norm, g.positions);
        ggml_tensor * v = ops.heads(kv, c.n_head_kv, c.n_head_kv);
        ops.store(g.graph, parts.cache, il, k, v, g.rows[static_cast<int>(parts.cache.kind(il))]);
    }
    return g;
}

}  // namespace dspine
