#include "engine/cost_sweep.h"

#include <algorithm>
#include <map>

namespace dspine {
namespace {

constexpr int32_t N_PASSES = 3;
constexpr size_t N_ALWAYS = 3;  // shortest, longest, middle

// 1..n so that any beginning of the list is spread evenly: the ends, then the middles of what is left.
std::vector<int32_t> spread(int32_t n) {
    std::vector<int32_t> out = {1};
    if (n > 1) {
        out.push_back(n);
    }
    for (int32_t step = n; step > 1; step = (step + 1) / 2) {
        for (int32_t i = 1; i <= n; i += std::max(1, step / 2)) {
            if (std::find(out.begin(), out.end(), i) == out.end()) {
                out.push_back(i);
            }
        }
    }
    return out;
}

class Sweep {
  public:
    Sweep(Target & target, DraftSource & drafter) : target_(target), drafter_(drafter) {}

    void clear() {
        for (int32_t seq = 0; seq < target_.n_seq(); ++seq) {
            target_.clear(seq);
            drafter_.truncate(seq, 0);
        }
    }

    // A decode of n tokens behind nothing, spread over as few sequences as hold them.
    double verify(int32_t n, int32_t n_per_seq) {
        clear();
        std::vector<BatchToken> batch;
        for (int32_t i = 0; i < n; ++i) {
            // Tokens that differ: experts and embeddings are read as in real text.
            const int32_t token = static_cast<int32_t>((int64_t{i} * 7919 + 13) % target_.n_vocab());
            batch.push_back({token, i % n_per_seq, i / n_per_seq, true});
        }
        const int64_t start = ggml_time_us();
        target_.decode(batch);
        return static_cast<double>(ggml_time_us() - start);
    }

    // The features of a decode, for drafts behind them.
    void commit(int32_t n) {
        verify(n, n);
        const size_t n_embd = static_cast<size_t>(target_.tensors()->n_embd);
        FeatureRows rows = {0, n, {}, n_embd};
        for (size_t t = 0; t < drafter_.taps().size(); ++t) {
            rows.taps.push_back(target_.taps(t));
        }
        drafter_.commit({rows});
    }

    double draft(int32_t n) {
        const int64_t start = ggml_time_us();
        drafter_.draft({{0, 1}}, n);
        return static_cast<double>(ggml_time_us() - start);
    }

  private:
    Target & target_;
    DraftSource & drafter_;
};

std::vector<CostPoint> as_points(const std::map<int32_t, double> & best) {
    std::vector<CostPoint> out;
    for (const auto & [n, us] : best) {
        out.push_back({n, std::max(us, 1.0)});
    }
    return out;
}

void keep_best(std::map<int32_t, double> & best, int32_t n, double us) {
    const auto [found, is_new] = best.emplace(n, us);
    found->second = std::min(found->second, us);
}

}  // namespace

Costs measure_costs(Target & target, DraftSource & drafter, double budget_us, const SweepProgress & progress) {
    const int32_t n_draft = std::min({drafter.max_draft(), target.n_rollback(), target.n_ctx_seq() - 1});
    target.enable_taps(drafter.taps());
    Sweep sweep(target, drafter);
    std::vector<int32_t> rows = spread(n_draft + 1);
    for (int32_t n_seq = 2; n_seq <= target.n_seq(); n_seq *= 2) {
        rows.push_back(n_seq * (n_draft + 1));
    }
    const std::vector<int32_t> lengths = spread(n_draft);
    const int32_t n_all = N_PASSES * static_cast<int32_t>(rows.size() + lengths.size());
    std::map<int32_t, double> verify, draft;
    int32_t n_done = 0;
    sweep.verify(n_draft + 1, n_draft + 1);  // weights are read from the disk, threads started
    const int64_t start = ggml_time_us();
    const auto within = [&](double share) { return static_cast<double>(ggml_time_us() - start) < share * budget_us; };
    for (int32_t pass = 0; pass < N_PASSES; ++pass) {
        const double share = static_cast<double>(pass + 1) / N_PASSES;
        for (size_t i = 0; i < rows.size(); ++i) {
            if (within(pass == 0 ? 0.7 : share) || (pass == 0 && i < N_ALWAYS)) {
                keep_best(verify, rows[i], sweep.verify(rows[i], n_draft + 1));
            }
            progress(++n_done, n_all);
        }
        sweep.commit(n_draft + 1);
        if (pass == 0) {
            sweep.draft(n_draft);
        }
        for (size_t i = 0; i < lengths.size(); ++i) {
            if (within(pass == 0 ? 1.0 : share) || (pass == 0 && i < N_ALWAYS)) {
                keep_best(draft, lengths[i], sweep.draft(lengths[i]));
            }
            progress(++n_done, n_all);
        }
    }
    sweep.clear();
    return {as_points(verify), as_points(draft)};
}

}  // namespace dspine
