#include "target/target_tensors.h"

#include <cstring>

#include "base/errors.h"

namespace dspine {

const void * RowReader::in_place(int64_t row) const {
    if (matrix_ == nullptr || !ggml_backend_buffer_is_host(matrix_->buffer)) {
        return nullptr;
    }
    return static_cast<const char *>(matrix_->data) + static_cast<size_t>(row) * matrix_->nb[1];
}

void RowReader::read(int64_t row, float * out) const {
    const int64_t n = matrix_->ne[0];
    const size_t n_bytes = ggml_row_size(matrix_->type, n);
    std::vector<char> copy;
    const void * src = in_place(row);
    if (src == nullptr) {
        copy.resize(n_bytes);
        ggml_backend_tensor_get(matrix_, copy.data(), static_cast<size_t>(row) * matrix_->nb[1], n_bytes);
        src = copy.data();
    }
    if (matrix_->type == GGML_TYPE_F32) {
        std::memcpy(out, src, n_bytes);
    } else {
        ggml_get_type_traits(matrix_->type)->to_float(src, out, n);
    }
}

std::shared_ptr<TargetTensors> TargetTensors::from_arrays(const float * embed, const float * head, int64_t n_vocab,
                                                          int64_t n_embd) {
    auto t = std::make_shared<TargetTensors>();
    t->n_embd = n_embd;
    t->n_vocab = n_vocab;
    t->device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (t->device == nullptr) {
        throw BackendError("ggml has no CPU device");
    }
    t->owned_ctx = make_context(2);
    ggml_tensor * embed_tensor = ggml_new_tensor_2d(t->owned_ctx.get(), GGML_TYPE_F32, n_embd, n_vocab);
    t->output = ggml_new_tensor_2d(t->owned_ctx.get(), GGML_TYPE_F32, n_embd, n_vocab);
    t->owned_buffer.reset(
        ggml_backend_alloc_ctx_tensors_from_buft(t->owned_ctx.get(), ggml_backend_dev_buffer_type(t->device)));
    if (!t->owned_buffer) {
        throw BackendError("out of memory for the target's embedding and output matrix");
    }
    ggml_backend_tensor_set(embed_tensor, embed, 0, ggml_nbytes(embed_tensor));
    ggml_backend_tensor_set(t->output, head, 0, ggml_nbytes(t->output));
    t->token_embd = embed_tensor;
    t->output_rows = t->output;
    return t;
}

}  // namespace dspine
