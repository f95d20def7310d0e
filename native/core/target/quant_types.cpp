#include "target/quant_types.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "base/backend.h"
#include "base/check.h"
#include "base/log.h"
#include "llama-cpp.h"
#include "target/llama_internal.h"

namespace dspine {

std::vector<ggml_type> quantized_types(const ModelShape & model, const std::vector<TensorShape> & tensors,
                                       llama_ftype file_type) {
    if (model.arch != "llama" && model.arch != "qwen3" && model.arch != "qwen35") {  // llama.cpp aborts on others
        throw std::invalid_argument("no shapes of architecture '" + model.arch + "', expected llama, qwen3 or qwen35");
    }
    need_range("n_layer", model.n_layer, 1, 512);
    const LogScope log;
    const llama_quant_model_desc desc = {model.arch.c_str(), model.n_embd,    model.n_ff, model.n_layer,
                                         model.n_head,       model.n_head_kv, 0,          model.head_dim,
                                         model.head_dim};
    const llama_model_ptr mock(llama_quant_model_from_metadata(&desc));
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = file_type;
    const std::unique_ptr<quantize_state_impl, decltype(&llama_quant_free)> state(llama_quant_init(mock.get(), &params),
                                                                                  &llama_quant_free);

    const ggml_context_ptr ctx = make_context(tensors.size());
    std::vector<ggml_type> types(tensors.size(), GGML_TYPE_F32);
    std::vector<ggml_tensor *> quantizable;
    std::vector<size_t> places;
    for (size_t i = 0; i < tensors.size(); ++i) {
        const std::vector<int64_t> & ne = tensors[i].ne;
        if (ne.empty() || ne.size() > GGML_MAX_DIMS || *std::min_element(ne.begin(), ne.end()) < 1) {
            throw std::invalid_argument("tensor '" + tensors[i].name + "' has no shape");
        }
        ggml_tensor * t = ggml_new_tensor(ctx.get(), GGML_TYPE_F32, static_cast<int>(ne.size()), ne.data());
        ggml_set_name(t, tensors[i].name.c_str());
        if (llama_quant_tensor_allows_quantization(state.get(), t)) {
            quantizable.push_back(t);
            places.push_back(i);
        }
    }
    std::vector<ggml_type> chosen(quantizable.size());
    llama_quant_compute_types(state.get(), file_type, quantizable.data(), chosen.data(), quantizable.size());
    for (size_t i = 0; i < places.size(); ++i) {
        types[places[i]] = chosen[i];
    }
    return types;
}

}  // namespace dspine
