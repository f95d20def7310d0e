#include "gguf/quantize.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/check.h"

namespace dspine {
namespace {

constexpr ggml_type TYPES[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q6_K,
                               GGML_TYPE_Q5_K, GGML_TYPE_Q4_K, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q4_0,
                               GGML_TYPE_Q4_1, GGML_TYPE_Q3_K, GGML_TYPE_Q2_K};

std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
    return text;
}

void check_rows(ggml_type type, int64_t n_per_row) {
    if (n_per_row <= 0 || n_per_row % ggml_blck_size(type) != 0) {
        throw std::invalid_argument("rows of " + std::to_string(n_per_row) + " values do not divide into blocks of " +
                                    std::to_string(ggml_blck_size(type)) + " (" + ggml_type_name(type) + ")");
    }
}

// Calls work(first, last) for parts of the rows, in threads.
template <typename Work>
void in_parts(int64_t n_rows, int n_threads, const Work & work) {
    need_range("n_threads", n_threads, 0, MAX_THREADS);
    const int64_t n_hardware = std::max(1u, std::thread::hardware_concurrency());
    const int64_t n_workers =
        std::clamp<int64_t>(n_threads > 0 ? n_threads : n_hardware, 1, std::max<int64_t>(1, n_rows));
    std::vector<std::future<void>> workers;  // each waits for its thread when it goes, also on an exception
    for (int64_t i = 1; i < n_workers; ++i) {
        workers.push_back(std::async(std::launch::async, work, n_rows * i / n_workers, n_rows * (i + 1) / n_workers));
    }
    work(0, n_rows / n_workers);
    for (std::future<void> & worker : workers) {
        worker.get();
    }
}

}  // namespace

ggml_type parse_type(const std::string & name) {
    std::string known;
    for (const ggml_type type : TYPES) {
        if (lower(name) == lower(ggml_type_name(type))) {
            return type;
        }
        known += (known.empty() ? "" : ", ") + lower(ggml_type_name(type));
    }
    throw std::invalid_argument("unknown tensor type '" + name + "', expected one of " + known);
}

void quantize_rows(ggml_type type, const float * src, void * dst, int64_t n_rows, int64_t n_per_row,
                   const float * importance, int n_threads) {
    check_rows(type, n_per_row);
    const size_t row_bytes = ggml_row_size(type, n_per_row);
    ggml_quantize_init(type);
    in_parts(n_rows, n_threads, [=](int64_t first, int64_t last) {
        char * out = static_cast<char *>(dst) + static_cast<size_t>(first) * row_bytes;
        const float * in = src + first * n_per_row;
        if (type == GGML_TYPE_F32) {
            std::copy(in, in + (last - first) * n_per_row, reinterpret_cast<float *>(out));
        } else if (first < last) {
            ggml_quantize_chunk(type, in, out, 0, last - first, n_per_row, importance);
        }
    });
}

void dequantize_rows(ggml_type type, const void * src, float * dst, int64_t n_rows, int64_t n_per_row, int n_threads) {
    check_rows(type, n_per_row);
    const size_t row_bytes = ggml_row_size(type, n_per_row);
    const ggml_to_float_t to_float = ggml_get_type_traits(type)->to_float;
    in_parts(n_rows, n_threads, [=](int64_t first, int64_t last) {
        const char * in = static_cast<const char *>(src) + static_cast<size_t>(first) * row_bytes;
        float * out = dst + first * n_per_row;
        if (type == GGML_TYPE_F32) {
            std::memcpy(out, in, static_cast<size_t>(last - first) * row_bytes);
        } else if (first < last) {
            to_float(in, out, (last - first) * n_per_row);
        }
    });
}

}  // namespace dspine
