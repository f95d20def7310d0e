// Encoding of float rows in ggml's types by ggml's own quantizer, in threads. Called by the converter.
#pragma once

#include <cstdint>
#include <string>

#include "ggml.h"

namespace dspine {

// By ggml's name, case-insensitive. Throws std::invalid_argument, naming the types that exist.
ggml_type parse_type(const std::string & name);

// src: float32 [n_rows, n_per_row]; dst: n_rows * ggml_row_size(type, n_per_row) bytes. importance: float32
// [n_per_row], what an error in each column costs, or nullptr. n_threads 0: all cores.
void quantize_rows(ggml_type type, const float * src, void * dst, int64_t n_rows, int64_t n_per_row,
                   const float * importance, int n_threads);

// The other way. src: n_rows * ggml_row_size(type, n_per_row) bytes.
void dequantize_rows(ggml_type type, const void * src, float * dst, int64_t n_rows, int64_t n_per_row, int n_threads);

}  // namespace dspine
