#include "target/logprobs.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "base/errors.h"

namespace dspine {

TokenLogprobs token_logprobs(const float * logits, int32_t n_vocab, int32_t token, int32_t n_top) {
    const float largest = *std::max_element(logits, logits + n_vocab);
    double sum = 0.0;
    for (int32_t i = 0; i < n_vocab; ++i) {
        sum += std::exp(static_cast<double>(logits[i]) - largest);
    }
    const float log_sum = largest + static_cast<float>(std::log(sum));
    if (!std::isfinite(log_sum)) {  // sorting what has no order is undefined
        throw BackendError("the target's logits are not finite numbers");
    }
    TokenLogprobs out = {logits[token] - log_sum, {}};
    const size_t n = static_cast<size_t>(std::clamp(n_top, 0, n_vocab));
    if (n == 0) {
        return out;
    }
    std::vector<int32_t> ids(static_cast<size_t>(n_vocab));
    std::iota(ids.begin(), ids.end(), 0);
    std::partial_sort(ids.begin(), ids.begin() + static_cast<ptrdiff_t>(n), ids.end(),
                      [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
    for (size_t i = 0; i < n; ++i) {
        out.top.emplace_back(ids[i], logits[ids[i]] - log_sum);
    }
    return out;
}

}  // namespace dspine
