#include "drafter/drafter.h"

#include "bindings.h"
#include "drafter/simulated_drafter.h"

namespace dspine {
namespace {

py::list stack_layers(const std::vector<std::vector<float>> & layers, py::ssize_t n_slots) {
    py::list out;
    for (const std::vector<float> & layer : layers) {
        out.append(to_array(layer, {n_slots, static_cast<py::ssize_t>(layer.size()) / n_slots}));
    }
    return out;
}

py::dict trace_to_python(const Drafter & drafter, const BlockTrace & t) {
    const DrafterConfig & c = drafter.config();
    const py::ssize_t n = static_cast<py::ssize_t>(t.draft.tokens.size());
    const py::ssize_t n_slots = static_cast<py::ssize_t>(t.final_hidden.size()) / c.n_embd;
    py::dict out;
    out["pre_injection"] = stack_layers(t.pre_injection, n_slots);
    out["post_injection"] = stack_layers(t.post_injection, n_slots);
    out["layer_features"] = stack_layers(t.layer_features, n_slots);
    out["final_hidden"] = to_array(t.final_hidden, {n_slots, static_cast<py::ssize_t>(c.n_embd)});
    out["logits"] = to_array(t.logits, {n, static_cast<py::ssize_t>(c.n_vocab)});
    out["candidates"] = to_array(t.candidates, {n, c.top_k});
    if (!t.scores.empty()) {
        out["scores"] = to_array(t.scores, {n, c.top_k, c.top_k});
    }
    out["selected"] = to_array(t.draft.tokens, {n});
    return out;
}

}  // namespace

void bind_drafter(py::module_ & m) {
    py::class_<DraftSource, std::shared_ptr<DraftSource>>(m, "DraftSource")
        .def_property_readonly("max_draft", &DraftSource::max_draft);
    py::class_<TargetTensors, std::shared_ptr<TargetTensors>>(m, "TargetTensors")
        .def_static(
            "from_arrays",
            [](const FloatArray & embed, const FloatArray & head) {
                need_shape(embed, "embed", {-1, -1});
                need_shape(head, "head", {embed.shape(0), embed.shape(1)});
                return TargetTensors::from_arrays(embed.data(), head.data(), embed.shape(0), embed.shape(1));
            },
            py::arg("embed"), py::arg("head"));
    py::class_<Draft>(m, "Draft")
        .def_readonly("tokens", &Draft::tokens)
        .def_readonly("probabilities", &Draft::probabilities);
    py::class_<Drafter, DraftSource, std::shared_ptr<Drafter>>(m, "Drafter")
        .def(py::init([](const std::string & path, std::shared_ptr<TargetTensors> target, int32_t n_seq, int32_t n_ctx,
                         int n_threads, const std::string & cache_type, const std::string & order,
                         const std::string & device) {
                 const py::gil_scoped_release release;
                 return std::make_shared<Drafter>(path, std::move(target),
                                                  DrafterOptions{n_seq, n_ctx, n_threads, cache_type, order, device});
             }),
             py::arg("path"), py::arg("target"), py::kw_only(), py::arg("n_seq") = 1, py::arg("n_ctx") = 4096,
             py::arg("n_threads") = 0, py::arg("cache_type") = "f16", py::arg("order") = "auto", py::arg("device") = "")
        .def_property_readonly("block_size", [](const Drafter & d) { return d.config().block_size; })
        .def_property_readonly("n_taps", [](const Drafter & d) { return d.config().n_taps(); })
        .def_property_readonly("n_embd", [](const Drafter & d) { return d.config().n_embd; })
        .def_property_readonly("has_injection", [](const Drafter & d) { return d.config().injection; })
        .def_property_readonly("target_layers", [](const Drafter & d) { return d.config().target_layers; })
        .def_property_readonly("target_vocab_sha256", [](const Drafter & d) { return d.config().target_vocab_sha256; })
        .def_property_readonly("device", &Drafter::device)
        .def_property_readonly("order",
                               [](const Drafter & d) { return d.order() == TransitionOrder::path ? "path" : "full"; })
        .def_property_readonly("weight_bytes", &Drafter::weight_bytes)
        .def_property_readonly("cache_bytes", &Drafter::cache_bytes)
        .def_property_readonly("compute_bytes", &Drafter::compute_bytes)
        .def("memory", [](const Drafter & d) { return to_tuples(d.memory()); })
        .def(
            "operations",
            [](const Drafter & d, const std::string & device) {
                std::vector<std::tuple<std::string, std::string, int32_t, bool>> all;
                for (const OperationUse & use : d.operations(device)) {
                    all.emplace_back(use.name, use.type, use.n_nodes, use.supported);
                }
                return all;
            },
            py::arg("device"))
        .def("length", &Drafter::length, py::arg("seq"))
        .def("reusable", &Drafter::reusable, py::arg("seq"), py::arg("n"))
        .def("truncate", &Drafter::truncate, py::arg("seq"), py::arg("n"))
        .def(
            "commit",
            [](Drafter & d, int32_t seq, const FloatArray & features) {
                const size_t n_embd = static_cast<size_t>(d.config().n_embd);
                need_shape(features, "features",
                           {-1, static_cast<py::ssize_t>(d.config().n_taps() * d.config().n_embd)});
                FeatureRows rows = {
                    seq, static_cast<int32_t>(features.shape(0)), {}, static_cast<size_t>(features.shape(1))};
                for (size_t tap = 0; tap < d.config().target_layers.size(); ++tap) {
                    rows.taps.push_back(features.data() + tap * n_embd);
                }
                const py::gil_scoped_release release;
                d.commit({rows});
            },
            py::arg("seq"), py::arg("features"))
        .def(
            "draft",
            [](Drafter & d, const std::vector<std::pair<int32_t, int32_t>> & blocks, int32_t n_draft) {
                std::vector<BlockRequest> requests;
                for (const auto & [seq, anchor] : blocks) {
                    requests.push_back({seq, anchor});
                }
                const py::gil_scoped_release release;
                return d.draft(requests, n_draft);
            },
            py::arg("blocks"), py::arg("n_draft"))
        .def(
            "trace",
            [](Drafter & d, int32_t seq, int32_t anchor, int32_t n_draft) {
                BlockTrace t;
                {
                    const py::gil_scoped_release release;
                    t = d.trace({seq, anchor}, n_draft);
                }
                return trace_to_python(d, t);
            },
            py::arg("seq"), py::arg("anchor"), py::arg("n_draft"));
    py::class_<SimulatedDrafter, DraftSource, std::shared_ptr<SimulatedDrafter>>(m, "SimulatedDrafter")
        .def(py::init<std::shared_ptr<DraftSource>, std::vector<float>, uint64_t, int32_t>(), py::arg("drafter"),
             py::arg("acceptance"), py::kw_only(), py::arg("seed"), py::arg("n_vocab"))
        .def("expect", &SimulatedDrafter::expect, py::arg("prompt"), py::arg("answer"));
}

}  // namespace dspine
