// What llama.cpp loads without a word and then aborts on in its first decode.
#pragma once

#include "gguf/gguf_file.h"

namespace dspine {

// Throws ModelFormatError for a file that is no target or that could not be computed with.
void check_target_header(const GgufFile & header);

}  // namespace dspine
