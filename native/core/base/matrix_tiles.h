// Intel AMX in llama.cpp's CPU backend. Compilers up to GCC 12 drop the stores that fill the tile configuration, and
// the first product then ends the process (ggml-org/llama.cpp issue 20824): find out before weights are laid out for
// it.
#pragma once

namespace dspine {

// Whether weights may go into the CPU backend's own layouts. False only where AMX is among them and a small product
// with it crashes or is wrong; tried once, in a child process.
bool cpu_layouts_work();

}  // namespace dspine
