#include "gguf/gguf_file.h"

#include <sys/stat.h>

#include <cstdio>
#include <memory>

#include "base/errors.h"
#include "base/log.h"

namespace dspine {
namespace {

struct FileCloser {
    void operator()(FILE * f) const { fclose(f); }
};
using file_ptr = std::unique_ptr<FILE, FileCloser>;

}  // namespace

GgufFile::GgufFile(const std::string & path) : path_(path) {
    struct stat st = {};
    if (stat(path.c_str(), &st) != 0) {
        throw FileNotFound(path);
    }
    if (!S_ISREG(st.st_mode)) {
        fail("is not a regular file");
    }
    file_ptr file(fopen(path.c_str(), "rb"));
    if (!file) {
        fail("cannot be opened for reading");
    }
    const LogScope log;
    ctx_.reset(gguf_init_from_file_ptr(file.get(), {/*no_alloc=*/true, /*ctx=*/nullptr}));
    if (!ctx_) {
        fail("is not a readable GGUF file" + log.reason());
    }
    const size_t data_offset = gguf_get_data_offset(ctx_.get());
    const size_t file_size = static_cast<size_t>(st.st_size);
    const int64_t n_tensors = gguf_get_n_tensors(ctx_.get());
    tensors_.reserve(static_cast<size_t>(n_tensors));
    for (int64_t i = 0; i < n_tensors; ++i) {
        GgufTensor t = {};
        t.name = gguf_get_tensor_name(ctx_.get(), i);
        t.type = gguf_get_tensor_type(ctx_.get(), i);
        t.n_dims = 1;
        const int64_t * ne = gguf_get_tensor_ne(ctx_.get(), i);
        for (int d = 0; d < GGML_MAX_DIMS; ++d) {
            t.ne[d] = ne[d];
            t.n_dims = ne[d] > 1 ? d + 1 : t.n_dims;
        }
        t.offset = data_offset + gguf_get_tensor_offset(ctx_.get(), i);
        t.n_bytes = gguf_get_tensor_size(ctx_.get(), i);
        if (t.offset > file_size || t.n_bytes > file_size - t.offset) {
            fail("is truncated: tensor '" + t.name + "' ends at byte " + std::to_string(t.offset + t.n_bytes) +
                 ", the file has " + std::to_string(file_size));
        }
        tensors_.push_back(std::move(t));
    }
}

void GgufFile::fail(const std::string & what) const {
    throw ModelFormatError("'" + path_ + "' " + what);
}

const GgufTensor * GgufFile::find_tensor(const std::string & name) const {
    const int64_t id = gguf_find_tensor(ctx_.get(), name.c_str());
    return id < 0 ? nullptr : &tensors_[static_cast<size_t>(id)];
}

bool GgufFile::has(const std::string & key) const {
    return gguf_find_key(ctx_.get(), key.c_str()) >= 0;
}

int64_t GgufFile::need(const std::string & key, gguf_type type) const {
    const int64_t id = gguf_find_key(ctx_.get(), key.c_str());
    if (id < 0) {
        fail("has no key '" + key + "'");
    }
    const gguf_type found = gguf_get_kv_type(ctx_.get(), id);
    if (found != type) {
        fail("has key '" + key + "' of type " + gguf_type_name(found) + ", expected " + gguf_type_name(type));
    }
    return id;
}

int64_t GgufFile::need_array(const std::string & key, gguf_type element) const {
    const int64_t id = need(key, GGUF_TYPE_ARRAY);
    const gguf_type found = gguf_get_arr_type(ctx_.get(), id);
    if (found != element) {
        fail("has key '" + key + "' of type " + gguf_type_name(found) + " array, expected " + gguf_type_name(element) +
             " array");
    }
    return id;
}

uint32_t GgufFile::u32(const std::string & key) const {
    return gguf_get_val_u32(ctx_.get(), need(key, GGUF_TYPE_UINT32));
}

uint32_t GgufFile::u32(const std::string & key, uint32_t fallback) const {
    return has(key) ? u32(key) : fallback;
}

float GgufFile::f32(const std::string & key) const {
    return gguf_get_val_f32(ctx_.get(), need(key, GGUF_TYPE_FLOAT32));
}

float GgufFile::f32(const std::string & key, float fallback) const {
    return has(key) ? f32(key) : fallback;
}

bool GgufFile::boolean(const std::string & key) const {
    return gguf_get_val_bool(ctx_.get(), need(key, GGUF_TYPE_BOOL));
}

std::string GgufFile::str(const std::string & key) const {
    return gguf_get_val_str(ctx_.get(), need(key, GGUF_TYPE_STRING));
}

std::string GgufFile::str(const std::string & key, const std::string & fallback) const {
    return has(key) ? str(key) : fallback;
}

std::vector<int32_t> GgufFile::i32_array(const std::string & key) const {
    const int64_t id = need_array(key, GGUF_TYPE_INT32);
    const auto * data = static_cast<const int32_t *>(gguf_get_arr_data(ctx_.get(), id));
    return {data, data + gguf_get_arr_n(ctx_.get(), id)};
}

std::vector<bool> GgufFile::bool_array(const std::string & key) const {
    const int64_t id = need_array(key, GGUF_TYPE_BOOL);
    const auto * data = static_cast<const int8_t *>(gguf_get_arr_data(ctx_.get(), id));
    return std::vector<bool>(data, data + gguf_get_arr_n(ctx_.get(), id));  // braces would make a list of two
}

std::vector<std::string> GgufFile::str_array(const std::string & key) const {
    const int64_t id = need_array(key, GGUF_TYPE_STRING);
    std::vector<std::string> out(gguf_get_arr_n(ctx_.get(), id));
    for (size_t i = 0; i < out.size(); ++i) {
        out[i] = gguf_get_arr_str(ctx_.get(), id, i);
    }
    return out;
}

int64_t GgufFile::array_length(const std::string & key) const {
    return static_cast<int64_t>(gguf_get_arr_n(ctx_.get(), need(key, GGUF_TYPE_ARRAY)));
}

void GgufFile::read(const GgufTensor & tensor, void * out) const {
    file_ptr file(fopen(path_.c_str(), "rb"));
    if (!file || fseeko(file.get(), static_cast<off_t>(tensor.offset), SEEK_SET) != 0 ||
        fread(out, 1, tensor.n_bytes, file.get()) != tensor.n_bytes) {
        fail("could not be read at tensor '" + tensor.name + "' (" + std::to_string(tensor.n_bytes) + " bytes)");
    }
}

}  // namespace dspine
