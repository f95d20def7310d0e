#include <cmath>

#include "drafter/drafter_layers.h"

namespace dspine {
namespace {

// Normalizing f_j: far below any real readout, far above float32's smallest number.
constexpr float READOUT_EPS = 1e-24f;

class DraftBuilder {
  public:
    DraftBuilder(const DrafterParts & parts, const DraftShape & shape)
        : p_(parts),
          c_(parts.config),
          w_(parts.weights),
          n_blocks_(shape.n_blocks()),
          n_cols_(shape.n_slots * shape.n_blocks()) {
        const size_t n_nodes = 128 + static_cast<size_t>(c_.n_layer) * (64 + 16 * shape.seqs.size());
        g_.shape = shape;
        g_.ctx.reset(
            ggml_init({n_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false), nullptr, true}));
        ctx_ = g_.ctx.get();
        g_.graph = ggml_new_graph_custom(ctx_, n_nodes, false);
    }

    DraftGraph build() {
        make_inputs();
        ggml_tensor * x = embed();
        for (int il = 0; il < c_.n_layer; ++il) {
            x = layer(il, x);
        }
        finish(x);
        return std::move(g_);
    }

  private:
    // The last layer's slot 0 only serves as key and value: nothing else of it is ever read.
    bool drops_anchor(int il) const { return il + 1 == c_.n_layer && !g_.shape.trace; }

    // Columns of slots [first, n_slots).
    ggml_tensor * slots_from(ggml_tensor * x, int64_t first) {
        return ggml_view_2d(ctx_, x, x->ne[0], x->ne[1] - first * n_blocks_, x->nb[1],
                            static_cast<size_t>(first * n_blocks_) * x->nb[1]);
    }

    ggml_tensor * slots_before_last(ggml_tensor * x) {
        return ggml_view_2d(ctx_, x, x->ne[0], x->ne[1] - n_blocks_, x->nb[1], 0);
    }

    void make_inputs() {
        g_.anchor_embd = ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, c_.n_embd, n_blocks_);
        ggml_set_input(g_.anchor_embd);
        if (c_.injection) {
            g_.anchors = new_input(ctx_, GGML_TYPE_I32, "anchors", n_blocks_);
        }
        g_.positions = new_input(ctx_, GGML_TYPE_I32, "positions", n_cols_);
        for (const LayerKind kind : {LayerKind::full, LayerKind::sliding}) {
            if (!p_.cache.has(kind)) {
                continue;
            }
            const int i = static_cast<int>(kind);
            g_.rows[i] = new_input(ctx_, GGML_TYPE_I64, "rows", n_cols_);
            for (const int64_t n_kv : g_.shape.n_kv[i]) {
                ggml_tensor * mask = ggml_new_tensor_2d(ctx_, GGML_TYPE_F16, n_kv, g_.shape.n_slots);
                ggml_set_input(mask);
                g_.masks[i].push_back(mask);
            }
        }
    }

    ggml_tensor * embed() {
        ggml_tensor * masked = ggml_repeat_4d(ctx_, p_.mask_embd, c_.n_embd, n_cols_ - n_blocks_, 1, 1);
        return ggml_concat(ctx_, g_.anchor_embd, masked, 1);  // [D, n_cols]
    }

    ggml_tensor * layer(int il, ggml_tensor * x) {
        const DrafterLayer & l = w_.layers[static_cast<size_t>(il)];
        const LayerOps ops(ctx_, c_);
        ggml_tensor * qkv =
            ggml_mul_mat(ctx_, l.attn_qkv, ops.norm(x, l.attn_norm));  // [n_embd_q + 2 * n_embd_kv, n_cols]
        ggml_tensor * k = ops.norm_rope(ops.heads(qkv, c_.n_head, c_.n_head_kv), l.attn_k_norm, g_.positions);
        ggml_tensor * v = ops.heads(qkv, c_.n_head + c_.n_head_kv, c_.n_head_kv);
        ops.store(g_.graph, p_.cache, il, k, v, g_.rows[static_cast<int>(p_.cache.kind(il))]);

        ggml_tensor * positions = g_.positions;
        if (drops_anchor(il)) {
            qkv = slots_from(qkv, 1);
            x = slots_from(x, 1);
            g_.positions_from_1 = new_input(ctx_, GGML_TYPE_I32, "positions_from_1", n_cols_ - n_blocks_);
            positions = g_.positions_from_1;
        }
        ggml_tensor * q = ops.norm_rope(ops.heads(qkv, 0, c_.n_head), l.attn_q_norm, positions);
        ggml_tensor * h = ggml_add(ctx_, x, ggml_mul_mat(ctx_, l.attn_output, attention(il, q)));
        ggml_tensor * gate_up = ggml_mul_mat(ctx_, l.ffn_gate_up, ops.norm(h, l.ffn_norm));  // [2 * F, n]
        ggml_tensor * y = ggml_add(ctx_, h, ggml_mul_mat(ctx_, l.ffn_down, ggml_swiglu(ctx_, gate_up)));
        return c_.injection ? inject(il, y) : y;
    }

    // q: [head_dim, n_head, n] -> [n_embd_q, n]
    ggml_tensor * attention(int il, ggml_tensor * q) {
        const int kind = static_cast<int>(p_.cache.kind(il));
        const int64_t n_slots = q->ne[2] / n_blocks_;
        const int64_t n_dropped = g_.shape.n_slots - n_slots;
        ggml_tensor * joined = nullptr;
        for (int64_t s = 0; s < n_blocks_; ++s) {
            const size_t at = static_cast<size_t>(s);
            ggml_tensor * q_s = ggml_view_3d(ctx_, q, c_.head_dim, c_.n_head, n_slots, q->nb[1],
                                             static_cast<size_t>(n_blocks_) * q->nb[2], at * q->nb[2]);
            ggml_tensor * mask = g_.masks[kind][at];
            if (n_dropped > 0) {
                mask = ggml_view_2d(ctx_, mask, mask->ne[0], n_slots, mask->nb[1],
                                    static_cast<size_t>(n_dropped) * mask->nb[1]);
            }
            ggml_tensor * out = ggml_flash_attn_ext(ctx_, ggml_permute(ctx_, q_s, 0, 2, 1, 3),
                                                    cached(p_.cache.k(il), il, at), cached(p_.cache.v(il), il, at),
                                                    mask, 1.0f / std::sqrt(static_cast<float>(c_.head_dim)), 0.0f,
                                                    0.0f);  // [head_dim, n_head, n_slots]
            ggml_prec_set_acc(out, GGML_PREC_F32);
            out = ggml_reshape_3d(ctx_, out, c_.n_embd_q(), 1, n_slots);
            joined = joined == nullptr ? out : ggml_concat(ctx_, joined, out, 1);
        }
        return ggml_reshape_2d(ctx_, joined, c_.n_embd_q(), q->ne[2]);
    }

    // The cells of one sequence, as attention wants them: [head_dim, n_kv, n_head_kv].
    ggml_tensor * cached(ggml_tensor * cache, int il, size_t block) {
        const LayerKind kind = p_.cache.kind(il);
        const size_t first = static_cast<size_t>(g_.shape.seqs[block] * p_.cache.n_cells(kind));
        return ggml_view_3d(ctx_, cache, c_.head_dim, g_.shape.n_kv[static_cast<int>(kind)][block], c_.n_head_kv,
                            cache->nb[1], ggml_row_size(cache->type, c_.head_dim), first * cache->nb[1]);
    }

    // sqrt(r) * normalize(R_l @ y): the root mean square of the result is one.
    ggml_tensor * readout(int il, ggml_tensor * y) {
        return ggml_rms_norm(ctx_, ggml_mul_mat(ctx_, w_.layers[static_cast<size_t>(il)].readout, y), READOUT_EPS);
    }

    // y: [D, n], all slots, or slots 1 and up on the last layer.
    ggml_tensor * inject(int il, ggml_tensor * y) {
        const bool has_anchor = y->ne[1] == n_cols_;
        ggml_tensor * y1 = has_anchor ? slots_from(y, 1) : y;
        ggml_tensor * f = readout(il, y1);                               // [r, n1]
        ggml_tensor * gate_f = ggml_mul_mat(ctx_, w_.gate_receiver, f);  // [m, n1]
        gate_f = ggml_add(ctx_, gate_f, w_.inject_bias);
        ggml_tensor * scale = ggml_sqrt(ctx_, ggml_scale(ctx_, ggml_sum_rows(ctx_, ggml_sqr(ctx_, y1)),
                                                         1.0f / static_cast<float>(c_.n_embd)));  // [1, n1]
        if (il + 1 == c_.n_layer) {
            y1_ = y1;
            gate_f_ = gate_f;
            scale_ = scale;
        }
        ggml_tensor * anchor_code = ggml_scale(ctx_, ggml_get_rows(ctx_, w_.codes, g_.anchors),
                                               std::sqrt(static_cast<float>(c_.rank)));  // [r, n_blocks]
        ggml_tensor * predecessor =
            f->ne[1] > n_blocks_ ? ggml_concat(ctx_, anchor_code, slots_before_last(f), 1) : anchor_code;
        ggml_tensor * after = write(il, y1, gate_f, scale, predecessor);
        ggml_tensor * out = has_anchor ? ggml_concat(ctx_, slots_before_first(y), after, 1) : after;
        if (g_.shape.trace) {
            g_.trace.pre_injection.push_back(y);
            g_.trace.post_injection.push_back(out);
            g_.trace.layer_features.push_back(readout(il, out));
        }
        return out;
    }

    ggml_tensor * slots_before_first(ggml_tensor * y) {
        return ggml_view_2d(ctx_, y, y->ne[0], n_blocks_, y->nb[1], 0);
    }

    // y + scale * W_l @ (sigmoid(gate_f + Gp @ p) * (M @ p)), column by column; p may have more columns per y
    // (broadcast).
    ggml_tensor * write(int il, ggml_tensor * y, ggml_tensor * gate_f, ggml_tensor * scale, ggml_tensor * p) {
        ggml_tensor * both = ggml_mul_mat(ctx_, w_.message_gate, p);  // [2 * m, ...]
        const auto half = [&](size_t i) {
            return ggml_view_3d(ctx_, both, c_.message, both->ne[1], both->ne[2], both->nb[1], both->nb[2],
                                i * static_cast<size_t>(c_.message) * sizeof(float));
        };
        ggml_tensor * gate = ggml_sigmoid(ctx_, ggml_add(ctx_, half(1), gate_f));
        ggml_tensor * update =
            ggml_mul_mat(ctx_, w_.layers[static_cast<size_t>(il)].write, ggml_mul(ctx_, gate, half(0)));
        return ggml_add(ctx_, ggml_mul(ctx_, update, scale), y);
    }

    // The output matrix is most of a block's work. ggml's CPU kernel for Q8_0 takes four columns at a time, and the one
    // for a rest of three costs more than that: fill up (benchmarks/dflash_compare.py).
    ggml_tensor * head(ggml_tensor * z) {
        const int64_t n = z->ne[1];
        const bool in_fours = p_.is_cpu && p_.target.output->type == GGML_TYPE_Q8_0 && n > 4 && n % 4 != 0;
        if (!in_fours) {
            return ggml_mul_mat(ctx_, p_.target.output, z);
        }
        ggml_tensor * filled = ggml_pad(ctx_, z, 0, static_cast<int>(4 - n % 4), 0, 0);
        ggml_tensor * logits = ggml_mul_mat(ctx_, p_.target.output, filled);
        return ggml_view_2d(ctx_, logits, logits->ne[0], n, logits->nb[1], 0);
    }

    void finish(ggml_tensor * x) {
        const LayerOps ops(ctx_, c_);
        ggml_tensor * z = ops.norm(x, w_.output_norm);
        if (g_.shape.trace) {
            g_.trace.final_hidden = z;
            z = slots_from(z, 1);
        }
        // Proposals beyond those asked for exist only when the block is bidirectional.
        const int64_t n_wanted = g_.shape.n_draft * n_blocks_;
        if (z->ne[1] > n_wanted) {
            z = ggml_view_2d(ctx_, z, z->ne[0], n_wanted, z->nb[1], 0);
        }
        g_.logits = head(z);  // [V, n_draft * n_blocks]
        if (!c_.injection) {
            g_.candidates = ggml_argmax(ctx_, g_.logits);
        } else if (p_.is_cpu) {
            g_.candidates = top_candidates(ctx_, g_.logits, c_.top_k);
        } else {
            g_.candidates = ggml_top_k(ctx_, g_.logits, c_.top_k);
        }
        output(g_.candidates);
        if (c_.injection && g_.shape.order == TransitionOrder::full) {
            score_all();
        } else if (c_.injection) {
            walk_path();
        }
        if (g_.shape.trace) {
            for (auto * list : {&g_.trace.pre_injection, &g_.trace.post_injection, &g_.trace.layer_features}) {
                for (ggml_tensor *& t : *list) {
                    output(t);
                }
            }
            output(g_.trace.final_hidden);
            output(g_.logits);
        }
    }

    void walk_path() {
        g_.walk = std::make_unique<PathWalk>();
        PathWalk & walk = *g_.walk;
        walk.n_blocks = n_blocks_;
        walk.n_draft = g_.shape.n_draft;
        walk.top_k = c_.top_k;
        walk.rms_eps = c_.rms_eps;
        walk.code_scale = std::sqrt(static_cast<float>(c_.rank));
        walk.codes = w_.codes;
        walk.message_gate = w_.message_gate;
        walk.write = w_.layers.back().write;
        walk.output_norm = w_.output_norm;
        walk.head = p_.target.output_rows;
        g_.path = walk.add_to_graph(ctx_, y1_, gate_f_, scale_, g_.candidates, g_.anchors);
        output(g_.path);
    }

    void score_all() {
        const int64_t n = g_.shape.n_draft * n_blocks_;
        const int64_t k = c_.top_k;
        // Predecessors: the anchor K times for slot 1, the candidates of the slot before for the others. Their codes
        // are joined, not their ids: devices repeat and concatenate floats only.
        ggml_tensor * p = ggml_repeat_4d(
            ctx_, ggml_reshape_3d(ctx_, ggml_get_rows(ctx_, w_.codes, g_.anchors), c_.rank, 1, n_blocks_), c_.rank, k,
            n_blocks_, 1);
        if (n > n_blocks_) {
            ggml_tensor * ids = ggml_view_1d(ctx_, g_.candidates, k * (n - n_blocks_), 0);
            ggml_tensor * codes = ggml_reshape_3d(ctx_, ggml_get_rows(ctx_, w_.codes, ids), c_.rank, k, n - n_blocks_);
            p = ggml_concat(ctx_, p, codes, 2);
        }
        p = ggml_scale(ctx_, p, std::sqrt(static_cast<float>(c_.rank)));  // [r, K, n]
        const auto per_slot = [&](ggml_tensor * x) { return ggml_reshape_3d(ctx_, x, x->ne[0], 1, x->ne[1]); };
        const LayerOps ops(ctx_, c_);
        ggml_tensor * u = write(c_.n_layer - 1, per_slot(y1_), per_slot(gate_f_), per_slot(scale_), p);  // [D, K, n]
        u = ops.norm(u, w_.output_norm);
        ggml_tensor * head = ggml_get_rows(ctx_, const_cast<ggml_tensor *>(p_.target.output_rows),
                                           ggml_reshape_1d(ctx_, g_.candidates, k * n));
        head = ggml_reshape_3d(ctx_, head, c_.n_embd, k, n);
        g_.scores = ggml_mul_mat(ctx_, head, u);  // [K of the slot, K of its predecessor, n]
        output(g_.scores);
    }

    void output(ggml_tensor *& t) {
        if (t->view_src != nullptr) {
            t = ggml_cont(ctx_, t);
        }
        ggml_set_output(t);
        ggml_build_forward_expand(g_.graph, t);
    }

    const DrafterParts & p_;
    const DrafterConfig & c_;
    const DrafterWeights & w_;
    const int64_t n_blocks_;
    const int64_t n_cols_;
    DraftGraph g_;
    ggml_context * ctx_ = nullptr;
    // Of the last layer, before its write: what refinement starts from, slots 1 and up.
    ggml_tensor * y1_ = nullptr;      // [D, n_draft * n_blocks]
    ggml_tensor * gate_f_ = nullptr;  // [m, n_draft * n_blocks]
    ggml_tensor * scale_ = nullptr;   // [1, n_draft * n_blocks]
};

}  // namespace

bool DraftShape::operator==(const DraftShape & o) const {
    return seqs == o.seqs && n_slots == o.n_slots && n_draft == o.n_draft && n_kv[0] == o.n_kv[0] &&
           n_kv[1] == o.n_kv[1] && order == o.order && trace == o.trace;
}

DraftGraph build_draft_graph(const DrafterParts & parts, const DraftShape & shape) {
    return DraftBuilder(parts, shape).build();
}

}  // namespace dspine
