#include "target/target_tensors.h"

#include <algorithm>
#include <cstring>

#include "base/devices.h"
#include "base/errors.h"

namespace dspine {
namespace {

constexpr size_t COPY_BYTES = 16 << 20;  // at a time, through the host

}  // namespace

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
    t->device = cpu_device();
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

std::shared_ptr<const TargetTensors> on_backend(std::shared_ptr<const TargetTensors> tensors, const Backend & backend) {
    ggml_backend_dev_t device = ggml_backend_get_device(backend.get());
    if (device == tensors->device) {
        return tensors;
    }
    const ggml_tensor * source = tensors->planned ? tensors->output : tensors->output_rows;
    if (source == nullptr) {
        throw BackendError("the target's output matrix cannot be read on device '" +
                           std::string(ggml_backend_dev_name(tensors->device)) + "', to be copied to '" +
                           backend.name() + "'");
    }
    auto copy = std::make_shared<TargetTensors>();
    copy->arch = tensors->arch;
    copy->n_layer = tensors->n_layer;
    copy->n_embd = tensors->n_embd;
    copy->n_vocab = tensors->n_vocab;
    copy->token_embd = tensors->token_embd;
    copy->device = device;
    copy->planned = tensors->planned;
    copy->owned_ctx = make_context(1);
    copy->output = ggml_new_tensor_2d(copy->owned_ctx.get(), source->type, source->ne[0], source->ne[1]);
    copy->output_rows = copy->output;
    copy->owned_buffer = allocate(copy->owned_ctx.get(), backend, "a copy of the target's output matrix");
    copy->n_bytes_owned = allocated_bytes(copy->owned_ctx.get(), copy->owned_buffer.get(), backend);
    if (!tensors->planned) {
        std::vector<char> part(std::min(ggml_nbytes(source), COPY_BYTES));
        for (size_t done = 0; done < ggml_nbytes(source); done += part.size()) {
            const size_t n = std::min(part.size(), ggml_nbytes(source) - done);
            ggml_backend_tensor_get(source, part.data(), done, n);
            ggml_backend_tensor_set(copy->output, part.data(), done, n);
        }
    }
    copy->owners.push_back(std::move(tensors));
    return copy;
}

}  // namespace dspine
