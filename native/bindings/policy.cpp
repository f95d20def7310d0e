#include "policy.h"

#include "bindings.h"
#include "engine/cost_sweep.h"
#include "policy/draft_length.h"

namespace dspine {
namespace {

// (forecast, limit) of every slot that drafts, and the lengths that each may verify, none for any.
using Slots = std::vector<std::pair<Forecast *, int32_t>>;
using Lengths = std::vector<std::vector<int32_t>>;

std::vector<DraftingSlot> to_slots(const Slots & slots, const Lengths & lengths) {
    if (!lengths.empty() && lengths.size() != slots.size()) {
        throw std::invalid_argument("lengths of " + std::to_string(lengths.size()) + " slots for " +
                                    std::to_string(slots.size()));
    }
    std::vector<DraftingSlot> out;
    for (const auto & [forecast, limit] : slots) {
        if (forecast == nullptr || limit < 1) {
            throw std::invalid_argument("a slot needs a forecast and a limit of at least 1, got " +
                                        std::to_string(limit));
        }
        out.push_back({forecast, limit, lengths.empty() ? std::vector<int32_t>{} : lengths[out.size()]});
    }
    return out;
}

}  // namespace

void bind_policy(py::module_ & m) {
    py::class_<Forecast>(m, "Forecast").def(py::init([] { return DraftLengthPolicy::new_forecast(); }));
    py::class_<DraftPlan>(m, "DraftPlan")
        .def_readonly("n_draft", &DraftPlan::n_draft)
        .def_readonly("probe", &DraftPlan::probe)
        .def_readonly("rate", &DraftPlan::rate);
    py::class_<SlotRecord>(m, "SlotRecord")
        .def_readonly("request", &SlotRecord::request)
        .def_readonly("limit", &SlotRecord::limit)
        .def_readonly("lengths", &SlotRecord::lengths)
        .def_readonly("n_verified", &SlotRecord::n_verified)
        .def_property_readonly("probabilities", [](const SlotRecord & r) { return r.outcome.probabilities; })
        .def_property_readonly("n_agreed", [](const SlotRecord & r) { return r.outcome.n_agreed; })
        .def_property_readonly("ended", [](const SlotRecord & r) { return r.outcome.ended; });
    py::class_<RoundRecord>(m, "RoundRecord")
        .def_readonly("plan", &RoundRecord::plan)
        .def_readonly("n_other", &RoundRecord::n_other)
        .def_readonly("slots", &RoundRecord::slots)
        .def_property_readonly("n_rows", [](const RoundRecord & r) { return r.cost.n_rows; })
        .def_property_readonly("n_columns", [](const RoundRecord & r) { return r.cost.n_columns; })
        .def_property_readonly("verify_us", [](const RoundRecord & r) { return r.cost.verify_us; })
        .def_property_readonly("decodes", [](const RoundRecord & r) { return from_costs(r.cost.decodes); })
        .def_property_readonly("draft_us", [](const RoundRecord & r) { return r.cost.draft_us; })
        .def_property_readonly("rest_us", [](const RoundRecord & r) { return r.cost.rest_us; })
        .def_property_readonly("n_emitted", [](const RoundRecord & r) { return r.cost.n_emitted; });
    py::class_<DraftLengthPolicy>(m, "DraftLengthPolicy")
        .def(py::init([](const Points & verify, const Points & draft, bool apart) {
                 return DraftLengthPolicy(to_costs(verify), to_costs(draft), apart);
             }),
             py::arg("verify_costs"), py::arg("draft_costs"), py::kw_only(), py::arg("apart") = false)
        .def_property_readonly("verify_costs", [](const DraftLengthPolicy & p) { return from_costs(p.verify_costs()); })
        .def_property_readonly("draft_costs", [](const DraftLengthPolicy & p) { return from_costs(p.draft_costs()); })
        .def(
            "plan",
            [](DraftLengthPolicy & p, const Slots & slots, int32_t n_other, const Lengths & lengths) {
                return p.plan(to_slots(slots, lengths), n_other);
            },
            py::arg("slots"), py::arg("n_other") = 0, py::kw_only(), py::arg("lengths") = Lengths{})
        .def(
            "cut",
            [](const DraftLengthPolicy & p, const DraftPlan & plan, const Slots & slots,
               const std::vector<std::vector<float>> & probabilities, int32_t n_other, const Lengths & lengths) {
                if (probabilities.size() != slots.size()) {
                    throw std::invalid_argument("probabilities of " + std::to_string(probabilities.size()) +
                                                " drafts for " + std::to_string(slots.size()) + " slots");
                }
                return p.cut(plan, to_slots(slots, lengths), probabilities, n_other);
            },
            py::arg("plan"), py::arg("slots"), py::arg("probabilities"), py::arg("n_other") = 0, py::kw_only(),
            py::arg("lengths") = Lengths{})
        .def(
            "observe_draft",
            [](DraftLengthPolicy & p, Forecast & forecast, const std::vector<float> & probabilities, int32_t n_agreed,
               bool ended) {
                if (n_agreed < 0) {
                    throw std::invalid_argument("n_agreed = " + std::to_string(n_agreed) + ", expected 0 or more");
                }
                p.observe(forecast, {probabilities, n_agreed, ended});
            },
            py::arg("forecast"), py::arg("probabilities"), py::arg("n_agreed"), py::arg("ended"))
        .def(
            "observe_round",
            [](DraftLengthPolicy & p, const DraftPlan & plan, int32_t n_rows, int32_t n_columns, double verify_us,
               double draft_us, double rest_us, int32_t n_emitted, const Points & decodes) {
                p.observe(plan, {n_rows, n_columns, verify_us, draft_us, rest_us, n_emitted, to_costs(decodes)});
            },
            py::arg("plan"), py::kw_only(), py::arg("n_rows"), py::arg("n_columns"), py::arg("verify_us"),
            py::arg("draft_us"), py::arg("rest_us"), py::arg("n_emitted"), py::arg("decodes") = Points{});
    m.def(
        "measure_costs",
        [](const std::shared_ptr<Target> & target, const std::shared_ptr<DraftSource> & drafter, double budget_s,
           const py::object & progress) {
            const SweepProgress report = [&](int32_t n_done, int32_t n_all) {
                const py::gil_scoped_acquire acquire;
                if (PyErr_CheckSignals() != 0) {
                    throw py::error_already_set();
                }
                if (!progress.is_none()) {
                    progress(n_done, n_all);
                }
            };
            Costs costs;
            {
                const py::gil_scoped_release release;
                costs = measure_costs(*target, *drafter, budget_s * 1e6, report);
            }
            return std::make_pair(from_costs(costs.verify), from_costs(costs.draft));
        },
        py::arg("target"), py::arg("drafter"), py::kw_only(), py::arg("budget_s") = 1.5,
        py::arg("progress") = py::none());
}

}  // namespace dspine
