#include "target/target_header.h"

namespace dspine {
namespace {

bool is_norm_type(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

}  // namespace

void check_target_header(const GgufFile & header) {
    const std::string arch = header.str("general.architecture", "");
    if (arch == "dspine") {
        header.fail("is a drafter, expected a target model");
    }
    for (const GgufTensor & t : header.tensors()) {
        if (t.n_dims == 1 && !is_norm_type(t.type)) {
            header.fail("has tensor '" + t.name + "' of type " + ggml_type_name(t.type) +
                        ", expected f32, f16 or bf16 for a tensor of one dimension");
        }
    }
    // Keys of other types, such as one number per layer, are left to llama.cpp.
    const auto is_number = [&](const std::string & key) {
        const int64_t id = gguf_find_key(header.raw(), key.c_str());
        return id >= 0 && gguf_get_kv_type(header.raw(), id) == GGUF_TYPE_UINT32;
    };
    const std::string n_rot = arch + ".rope.dimension_count";
    const std::string n_head_dim = arch + ".attention.key_length";
    if (is_number(n_rot) && is_number(n_head_dim) && header.u32(n_rot) > header.u32(n_head_dim)) {
        header.fail("has " + n_rot + " = " + std::to_string(header.u32(n_rot)) + ", expected at most " + n_head_dim +
                    " = " + std::to_string(header.u32(n_head_dim)));
    }
}

}  // namespace dspine
