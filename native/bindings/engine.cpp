#include "engine/engine.h"

#include <limits>
#include <optional>

#include "bindings.h"
#include "policy.h"

namespace dspine {
namespace {

// Any Python function that guesses tokens, as a source of drafts: for tests of the loop, and for lookup drafters.
class CallbackDrafter final : public DraftSource {
  public:
    CallbackDrafter(py::function draft, int32_t n_seq, int32_t max_draft, std::vector<int32_t> taps)
        : draft_(std::move(draft)),
          max_draft_(max_draft),
          taps_(std::move(taps)),
          lengths_(static_cast<size_t>(n_seq), 0) {}

    ~CallbackDrafter() override {
        const py::gil_scoped_acquire acquire;
        draft_ = py::function();
    }

    int32_t max_draft() const override { return max_draft_; }
    int32_t n_seq() const override { return static_cast<int32_t>(lengths_.size()); }
    int32_t n_ctx() const override { return std::numeric_limits<int32_t>::max(); }
    const std::vector<int32_t> & taps() const override { return taps_; }
    int32_t length(int32_t seq) const override { return lengths_.at(static_cast<size_t>(seq)); }
    int32_t reusable(int32_t seq, int32_t n) const override { return std::min(n, length(seq)); }
    int32_t lookback() const override { return 0; }
    void truncate(int32_t seq, int32_t n) override { lengths_.at(static_cast<size_t>(seq)) = n; }

    std::string save(int32_t seq) const override { return std::to_string(length(seq)); }
    void load(int32_t seq, const std::string & state) override { truncate(seq, std::stoi(state)); }

    void commit(const std::vector<FeatureRows> & rows) override {
        for (const FeatureRows & part : rows) {
            lengths_.at(static_cast<size_t>(part.seq)) += part.n;
        }
    }

    std::vector<Draft> draft(const std::vector<BlockRequest> & blocks, int32_t n_draft) override {
        const py::gil_scoped_acquire acquire;
        std::vector<Draft> drafts;
        for (const BlockRequest & block : blocks) {
            drafts.push_back({draft_(block.seq, *block.tokens, n_draft).cast<std::vector<int32_t>>(), {}});
        }
        return drafts;
    }

  private:
    py::function draft_;
    int32_t max_draft_;
    std::vector<int32_t> taps_;
    std::vector<int32_t> lengths_;
};

// By draft length, from 1 on: pairs of a first position and the one behind the last.
using Ranges = std::vector<std::vector<std::pair<int32_t, int32_t>>>;

std::optional<ExactLengths> to_exact(const std::optional<Ranges> & ranges) {
    if (!ranges) {
        return std::nullopt;
    }
    std::vector<std::vector<ExactLengths::Range>> by_length;
    for (const auto & pairs : *ranges) {
        by_length.emplace_back();
        for (const auto & [first, last] : pairs) {
            by_length.back().push_back({first, last});
        }
    }
    return ExactLengths(std::move(by_length));
}

const char * finish_name(Finish finish) {
    switch (finish) {
        case Finish::stop: return "stop";
        case Finish::length: return "length";
        case Finish::cancelled: return "cancelled";
        case Finish::error: return "error";
        case Finish::none: break;
    }
    return nullptr;
}

}  // namespace

void bind_engine(py::module_ & m) {
    py::class_<SamplingParams>(m, "SamplingParams")
        .def(py::init<>())
        .def_readwrite("seed", &SamplingParams::seed)
        .def_readwrite("temperature", &SamplingParams::temperature)
        .def_readwrite("dynatemp_range", &SamplingParams::dynatemp_range)
        .def_readwrite("dynatemp_exponent", &SamplingParams::dynatemp_exponent)
        .def_readwrite("top_k", &SamplingParams::top_k)
        .def_readwrite("top_p", &SamplingParams::top_p)
        .def_readwrite("min_p", &SamplingParams::min_p)
        .def_readwrite("typical_p", &SamplingParams::typical_p)
        .def_readwrite("top_n_sigma", &SamplingParams::top_n_sigma)
        .def_readwrite("xtc_probability", &SamplingParams::xtc_probability)
        .def_readwrite("xtc_threshold", &SamplingParams::xtc_threshold)
        .def_readwrite("repeat_last_n", &SamplingParams::repeat_last_n)
        .def_readwrite("repeat_penalty", &SamplingParams::repeat_penalty)
        .def_readwrite("frequency_penalty", &SamplingParams::frequency_penalty)
        .def_readwrite("presence_penalty", &SamplingParams::presence_penalty)
        .def_readwrite("dry_multiplier", &SamplingParams::dry_multiplier)
        .def_readwrite("dry_base", &SamplingParams::dry_base)
        .def_readwrite("dry_allowed_length", &SamplingParams::dry_allowed_length)
        .def_readwrite("dry_penalty_last_n", &SamplingParams::dry_penalty_last_n)
        .def_readwrite("dry_sequence_breakers", &SamplingParams::dry_sequence_breakers)
        .def_readwrite("samplers", &SamplingParams::samplers)
        .def_readwrite("min_keep", &SamplingParams::min_keep)
        .def_readwrite("logit_bias", &SamplingParams::logit_bias)
        .def_readwrite("ignore_eos", &SamplingParams::ignore_eos)
        .def_readwrite("grammar", &SamplingParams::grammar);
    py::class_<RequestStats>(m, "RequestStats")
        .def_readonly("n_prompt", &RequestStats::n_prompt)
        .def_readonly("n_reused", &RequestStats::n_reused)
        .def_readonly("n_generated", &RequestStats::n_generated)
        .def_readonly("n_rounds", &RequestStats::n_rounds)
        .def_readonly("n_drafted", &RequestStats::n_drafted)
        .def_readonly("n_accepted", &RequestStats::n_accepted)
        .def_readonly("rounds_by_draft", &RequestStats::rounds_by_draft)
        .def_readonly("drafted_at", &RequestStats::drafted_at)
        .def_readonly("accepted_at", &RequestStats::accepted_at)
        .def_readonly("prefill_us", &RequestStats::prefill_us)
        .def_readonly("draft_us", &RequestStats::draft_us)
        .def_readonly("verify_us", &RequestStats::verify_us)
        .def_readonly("commit_us", &RequestStats::commit_us)
        .def_readonly("round_us", &RequestStats::round_us);
    py::class_<TokenLogprobs>(m, "TokenLogprobs")
        .def_readonly("logprob", &TokenLogprobs::logprob)
        .def_readonly("top", &TokenLogprobs::top);
    py::class_<SlotInfo>(m, "SlotInfo")
        .def_readonly("id", &SlotInfo::id)
        .def_property_readonly(
            "request",
            [](const SlotInfo & s) { return s.request < 0 ? std::nullopt : std::optional<int64_t>(s.request); })
        .def_readonly("generating", &SlotInfo::generating)
        .def_readonly("n_cached", &SlotInfo::n_cached)
        .def_readonly("n_prompt", &SlotInfo::n_prompt)
        .def_readonly("n_generated", &SlotInfo::n_generated);
    py::class_<SlotState>(m, "SlotState")
        .def(py::init([](std::vector<int32_t> tokens, const py::bytes & target, const py::bytes & drafter) {
                 return SlotState{std::move(tokens), target, drafter};
             }),
             py::arg("tokens"), py::arg("target"), py::arg("drafter"))
        .def_readonly("tokens", &SlotState::tokens)
        .def_property_readonly("target", [](const SlotState & s) { return py::bytes(s.target); })
        .def_property_readonly("drafter", [](const SlotState & s) { return py::bytes(s.drafter); });
    py::class_<StepEvent>(m, "StepEvent")
        .def_readonly("id", &StepEvent::id)
        .def_readonly("slot", &StepEvent::slot)
        .def_readonly("tokens", &StepEvent::tokens)
        .def_readonly("logprobs", &StepEvent::logprobs)
        .def_property_readonly("finish_reason", [](const StepEvent & e) { return finish_name(e.finish); })
        .def_property_readonly("error", [](const StepEvent & e) { return to_text(e.error); })
        .def_readonly("stats", &StepEvent::stats);
    py::class_<CallbackDrafter, DraftSource, std::shared_ptr<CallbackDrafter>>(m, "CallbackDrafter")
        .def(py::init<py::function, int32_t, int32_t, std::vector<int32_t>>(), py::arg("draft"), py::kw_only(),
             py::arg("n_seq") = 1, py::arg("max_draft") = 15, py::arg("taps") = std::vector<int32_t>{})
        .def("length", &CallbackDrafter::length, py::arg("seq"));
    py::class_<Engine>(m, "Engine")
        .def(py::init([](std::shared_ptr<Target> target, std::shared_ptr<DraftSource> drafter,
                         std::optional<int32_t> n_draft, const Points & verify_costs, const Points & draft_costs,
                         size_t checkpoint_bytes, const std::optional<Ranges> & exact) {
                 if (n_draft && *n_draft < 0) {  // the core's word for the automatic length
                     throw std::invalid_argument("n_draft = " + std::to_string(*n_draft) +
                                                 ", expected at least 0, or None");
                 }
                 const py::gil_scoped_release release;
                 return std::make_unique<Engine>(
                     std::move(target), std::move(drafter),
                     EngineOptions{n_draft.value_or(AUTO_DRAFT), to_costs(verify_costs), to_costs(draft_costs),
                                   checkpoint_bytes, to_exact(exact)});
             }),
             py::arg("target"), py::arg("drafter") = py::none(), py::kw_only(), py::arg("n_draft") = 7,
             py::arg("verify_costs") = Points{}, py::arg("draft_costs") = Points{},
             py::arg("checkpoint_bytes") = EngineOptions{}.checkpoint_bytes, py::arg("exact") = py::none())
        .def(
            "submit",
            [](Engine & e, std::vector<int32_t> tokens, const SamplingParams & sampling, int32_t max_tokens,
               std::vector<int32_t> stop_tokens, std::optional<int32_t> n_draft, bool cache_prompt, int32_t n_probs,
               bool post_sampling, int32_t slot, std::vector<int32_t> replay) {
                const py::gil_scoped_release release;
                return e.submit({std::move(tokens), sampling, max_tokens, std::move(stop_tokens), n_draft, cache_prompt,
                                 n_probs, post_sampling, slot, std::move(replay)});
            },
            py::arg("tokens"), py::arg("sampling"), py::kw_only(), py::arg("max_tokens") = -1,
            py::arg("stop_tokens") = std::vector<int32_t>{}, py::arg("n_draft") = py::none(),
            py::arg("cache_prompt") = true, py::arg("n_probs") = -1, py::arg("post_sampling") = false,
            py::arg("slot") = -1, py::arg("replay") = std::vector<int32_t>{})
        .def("cancel", &Engine::cancel, py::arg("id"), py::call_guard<py::gil_scoped_release>())
        .def("has_work", &Engine::has_work, py::call_guard<py::gil_scoped_release>())
        .def("step", &Engine::step, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("n_slots", &Engine::n_slots)
        .def_property_readonly("n_replaced", &Engine::n_replaced)
        .def("slots", &Engine::slots, py::call_guard<py::gil_scoped_release>())
        .def("save_slot", &Engine::save_slot, py::arg("slot"), py::call_guard<py::gil_scoped_release>())
        .def("restore_slot", &Engine::restore_slot, py::arg("slot"), py::arg("state"),
             py::call_guard<py::gil_scoped_release>())
        .def("erase_slot", &Engine::erase_slot, py::arg("slot"), py::call_guard<py::gil_scoped_release>())
        .def_property_readonly(
            "costs",
            [](const Engine & e) {
                std::optional<Costs> costs;
                {
                    const py::gil_scoped_release release;
                    costs = e.costs();
                }
                return costs ? py::object(py::make_tuple(from_costs(costs->verify), from_costs(costs->draft)))
                             : py::none();
            })
        .def_property_readonly("checkpoint_bytes",
                               py::cpp_function(&Engine::checkpoint_bytes, py::call_guard<py::gil_scoped_release>()))
        .def("record_rounds", &Engine::record_rounds, py::arg("n"), py::call_guard<py::gil_scoped_release>())
        .def("take_rounds", &Engine::take_rounds, py::call_guard<py::gil_scoped_release>())
        .def(
            "lengths",
            [](const Engine & e, int32_t slot) {
                SlotLengths n;
                {
                    const py::gil_scoped_release release;
                    n = e.lengths(slot);
                }
                return std::make_pair(n.target, n.drafter);
            },
            py::arg("slot"));
}

}  // namespace dspine
