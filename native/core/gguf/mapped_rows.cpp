#include "gguf/mapped_rows.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "base/errors.h"
#include "gguf/gguf_file.h"
#include "llama.h"

namespace dspine {
namespace {

std::vector<std::string> parts_of(const std::string & path) {
    const GgufFile first(path);
    if (!first.has("split.count")) {
        return {path};
    }
    const int64_t id = gguf_find_key(first.raw(), "split.count");
    const int n_parts = gguf_get_kv_type(first.raw(), id) == GGUF_TYPE_UINT16 ? gguf_get_val_u16(first.raw(), id) : 1;
    std::vector<char> buffer(path.size() + 64);
    if (llama_split_prefix(buffer.data(), buffer.size(), path.c_str(), 0, n_parts) <= 0) {
        return {path};
    }
    const std::string prefix = buffer.data();
    std::vector<std::string> parts;
    for (int i = 0; i < n_parts; ++i) {
        llama_split_path(buffer.data(), buffer.size(), prefix.c_str(), i, n_parts);
        parts.emplace_back(buffer.data());
    }
    return parts;
}

}  // namespace

MappedTensor::MappedTensor(const std::string & model_path, const std::string & name) {
    for (const std::string & part : parts_of(model_path)) {
        const GgufFile file(part);
        const GgufTensor * found = file.find_tensor(name);
        if (found == nullptr) {
            continue;
        }
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t first = found->offset / page * page;
        n_bytes_ = found->offset - first + found->n_bytes;
        const int fd = open(part.c_str(), O_RDONLY);
        void * address =
            fd < 0 ? MAP_FAILED : mmap(nullptr, n_bytes_, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(first));
        if (fd >= 0) {
            close(fd);
        }
        if (address == MAP_FAILED) {
            file.fail("cannot be mapped into memory at tensor '" + name + "'");
        }
        address_ = address;
        ctx_ = make_context(1);
        tensor_ = ggml_new_tensor_2d(ctx_.get(), found->type, found->ne[0], found->ne[1]);
        buffer_.reset(ggml_backend_cpu_buffer_from_ptr(address_, n_bytes_));
        ggml_backend_tensor_alloc(buffer_.get(), tensor_, static_cast<char *>(address_) + (found->offset - first));
        return;
    }
    throw ModelFormatError("'" + model_path + "' has no tensor '" + name + "'");
}

MappedTensor::~MappedTensor() {
    buffer_.reset();
    if (address_ != nullptr) {
        munmap(address_, n_bytes_);
    }
}

}  // namespace dspine
