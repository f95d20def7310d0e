#include <cstring>

#include "check.h"
#include "gguf/quantize.h"
#include "tiny_drafter.h"

using namespace dspine;

namespace {

constexpr const char * NAMES[] = {"f32",  "f16",  "bf16", "q8_0", "q6_k", "q5_k", "q4_k",
                                  "q5_0", "q5_1", "q4_0", "q4_1", "q3_k", "q2_k"};

std::vector<char> encode(ggml_type type, const std::vector<float> & src, int64_t n_rows, int64_t n_per_row,
                         int n_threads) {
    std::vector<char> out(static_cast<size_t>(n_rows) * ggml_row_size(type, n_per_row), 0x55);
    quantize_rows(type, src.data(), out.data(), n_rows, n_per_row, nullptr, n_threads);
    return out;
}

}  // namespace

TEST(every_thread_count_gives_the_same_bytes) {
    constexpr int64_t N_ROWS = 37, N_PER_ROW = 512;
    const auto src = test::random_floats(N_ROWS * N_PER_ROW, 1);
    for (const char * name : NAMES) {
        const ggml_type type = parse_type(name);
        const auto one = encode(type, src, N_ROWS, N_PER_ROW, 1);
        for (const int n_threads : {0, 2, 3, 7, 37, 100}) {
            CHECK(encode(type, src, N_ROWS, N_PER_ROW, n_threads) == one);
        }
    }
}

TEST(values_survive_within_the_precision_of_the_type) {
    constexpr int64_t N = 1024;
    const auto src = test::random_floats(N, 2);
    for (const char * name : NAMES) {
        const ggml_type type = parse_type(name);
        const auto bytes = encode(type, src, 1, N, 1);
        std::vector<float> back(N);
        if (type == GGML_TYPE_F32) {
            std::memcpy(back.data(), bytes.data(), bytes.size());
        } else {
            ggml_get_type_traits(type)->to_float(bytes.data(), back.data(), N);
        }
        for (size_t i = 0; i < N; ++i) {
            CHECK_NEAR(back[i], src[i], type == GGML_TYPE_Q2_K ? 0.5 : 0.3);
        }
    }
}

TEST(no_rows_is_no_work) {
    for (const int n_threads : {0, 1, 4}) {
        CHECK(encode(GGML_TYPE_Q8_0, {}, 0, 64, n_threads).empty());
    }
}

TEST(rows_that_blocks_do_not_divide_are_refused) {
    const auto src = test::random_floats(512, 3);
    CHECK_THROWS(std::invalid_argument, "rows of 33 values", encode(GGML_TYPE_Q8_0, src, 1, 33, 1));
    CHECK_THROWS(std::invalid_argument, "blocks of 256 (q4_K)", encode(GGML_TYPE_Q4_K, src, 1, 128, 1));
    CHECK_THROWS(std::invalid_argument, "rows of 0 values", encode(GGML_TYPE_F32, src, 1, 0, 1));
}

TEST(types_are_found_by_name_in_any_case) {
    CHECK_EQ(parse_type("Q4_K"), GGML_TYPE_Q4_K);
    CHECK_EQ(parse_type("bF16"), GGML_TYPE_BF16);
    CHECK_THROWS(std::invalid_argument, "unknown tensor type 'q9_9', expected one of f32, f16", parse_type("q9_9"));
    CHECK_THROWS(std::invalid_argument, "unknown tensor type ''", parse_type(""));
    CHECK_THROWS(std::invalid_argument, "unknown tensor type 'i32'", parse_type("i32"));
}
