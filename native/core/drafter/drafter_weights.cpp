#include "drafter/drafter_weights.h"

#include <set>

#include "gguf/schema.h"

namespace dspine {
namespace {

bool is_matrix_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q6_K:
        case GGML_TYPE_Q5_K:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q3_K:
        case GGML_TYPE_Q2_K: return true;
        default: return false;
    }
}

std::string shape(int64_t ne0, int64_t ne1) {
    return "[" + std::to_string(ne0) + ", " + std::to_string(ne1) + "]";
}

// Declares tensors first, so that one buffer holds them all, then fills them from the file.
class Loader {
  public:
    Loader(const GgufFile & file, ggml_context * ctx) : file_(file), ctx_(ctx) {}

    ggml_tensor * vector(const std::string & name, int64_t ne0) {
        const GgufTensor & part = need(name, ne0, 1);
        if (part.type != GGML_TYPE_F32) {
            file_.fail("has tensor '" + name + "' of type " + ggml_type_name(part.type) + ", expected f32");
        }
        return declare({&part}, ne0, 0);
    }

    ggml_tensor * matrix(const std::string & name, int64_t ne0, int64_t ne1) { return stack({{name, ne1}}, ne0); }

    // Matrices of one row length and one type, one below the other.
    ggml_tensor * stack(const std::vector<std::pair<std::string, int64_t>> & names, int64_t ne0) {
        std::vector<const GgufTensor *> parts;
        int64_t n_rows = 0;
        for (const auto & [name, ne1] : names) {
            const GgufTensor & part = need(name, ne0, ne1);
            if (!is_matrix_type(part.type)) {
                file_.fail("has tensor '" + name + "' of type " + ggml_type_name(part.type) +
                           ", which drafters do not use");
            }
            if (!parts.empty() && part.type != parts[0]->type) {
                file_.fail("has tensor '" + name + "' of type " + ggml_type_name(part.type) + ", expected " +
                           ggml_type_name(parts[0]->type) + " like '" + parts[0]->name + "'");
            }
            parts.push_back(&part);
            n_rows += ne1;
        }
        return declare(parts, ne0, n_rows);
    }

    void refuse_others() const {
        for (const GgufTensor & tensor : file_.tensors()) {
            if (used_.count(tensor.name) == 0) {
                file_.fail("has tensor '" + tensor.name + "', which no part of this drafter uses");
            }
        }
    }

    void fill() const {
        std::vector<char> staging;
        for (const auto & [dst, parts] : plan_) {
            size_t offset = 0;
            for (const GgufTensor * part : parts) {
                staging.resize(part->n_bytes);
                file_.read(*part, staging.data());
                ggml_backend_tensor_set(dst, staging.data(), offset, part->n_bytes);
                offset += part->n_bytes;
            }
        }
    }

  private:
    const GgufTensor & need(const std::string & name, int64_t ne0, int64_t ne1) {
        const GgufTensor * part = file_.find_tensor(name);
        if (part == nullptr) {
            file_.fail("has no tensor '" + name + "'");
        }
        if (part->n_dims > 2 || part->ne[0] != ne0 || part->ne[1] != ne1) {
            file_.fail("has tensor '" + name + "' of shape " + shape(part->ne[0], part->ne[1]) + ", expected " +
                       shape(ne0, ne1));
        }
        used_.insert(name);
        return *part;
    }

    ggml_tensor * declare(std::vector<const GgufTensor *> parts, int64_t ne0, int64_t ne1) {
        const ggml_type type = parts[0]->type;
        ggml_tensor * t = ne1 == 0 ? ggml_new_tensor_1d(ctx_, type, ne0) : ggml_new_tensor_2d(ctx_, type, ne0, ne1);
        ggml_set_name(t, parts[0]->name.c_str());
        plan_.emplace_back(t, std::move(parts));
        return t;
    }

    const GgufFile & file_;
    ggml_context * ctx_;
    std::vector<std::pair<ggml_tensor *, std::vector<const GgufTensor *>>> plan_;
    std::set<std::string> used_;
};

}  // namespace

DrafterWeights load_weights(const GgufFile & file, const DrafterConfig & c, const Backend & backend) {
    DrafterWeights w;
    w.ctx = make_context(file.tensors().size() + 1);
    Loader load(file, w.ctx.get());

    w.fc = load.matrix(schema::TENSOR_FC, c.n_taps() * c.n_embd, c.n_embd);
    w.hidden_norm = load.vector(schema::TENSOR_HIDDEN_NORM, c.n_embd);
    w.output_norm = load.vector(schema::TENSOR_OUTPUT_NORM, c.n_embd);
    if (c.injection) {
        w.message_gate = load.stack(
            {{schema::TENSOR_INJECT_MESSAGE, c.message}, {schema::TENSOR_INJECT_GATE_PREDECESSOR, c.message}}, c.rank);
        w.gate_receiver = load.matrix(schema::TENSOR_INJECT_GATE_RECEIVER, c.rank, c.message);
        w.inject_bias = load.vector(schema::TENSOR_INJECT_BIAS, c.message);
        w.codes = load.matrix(schema::TENSOR_INJECT_CODES, c.rank, c.n_vocab);
    }
    for (int il = 0; il < c.n_layer; ++il) {
        const auto name = [il](const char * pattern) { return schema::layer(pattern, il); };
        DrafterLayer layer = {};
        layer.attn_norm = load.vector(name(schema::TENSOR_ATTN_NORM), c.n_embd);
        layer.attn_qkv = load.stack({{name(schema::TENSOR_ATTN_Q), c.n_embd_q()},
                                     {name(schema::TENSOR_ATTN_K), c.n_embd_kv()},
                                     {name(schema::TENSOR_ATTN_V), c.n_embd_kv()}},
                                    c.n_embd);
        layer.attn_output = load.matrix(name(schema::TENSOR_ATTN_OUTPUT), c.n_embd_q(), c.n_embd);
        layer.attn_q_norm = load.vector(name(schema::TENSOR_ATTN_Q_NORM), c.head_dim);
        layer.attn_k_norm = load.vector(name(schema::TENSOR_ATTN_K_NORM), c.head_dim);
        layer.ffn_norm = load.vector(name(schema::TENSOR_FFN_NORM), c.n_embd);
        layer.ffn_gate_up =
            load.stack({{name(schema::TENSOR_FFN_GATE), c.n_ff}, {name(schema::TENSOR_FFN_UP), c.n_ff}}, c.n_embd);
        layer.ffn_down = load.matrix(name(schema::TENSOR_FFN_DOWN), c.n_ff, c.n_embd);
        if (c.injection) {
            layer.readout = load.matrix(name(schema::TENSOR_INJECT_READOUT), c.n_embd, c.rank);
            layer.write = load.matrix(name(schema::TENSOR_INJECT_WRITE), c.message, c.n_embd);
        }
        w.layers.push_back(layer);
    }
    load.refuse_others();

    w.buffer = allocate(w.ctx.get(), backend, "the drafter's weights");
    w.n_bytes = allocated_bytes(w.ctx.get(), w.buffer.get(), backend);
    ggml_backend_buffer_set_usage(w.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    if (!backend.planned) {
        load.fill();
    }
    return w;
}

}  // namespace dspine
