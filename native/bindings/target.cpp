#include "target/target.h"

#include "base/check.h"
#include "base/devices.h"
#include "bindings.h"
#include "target/quant_types.h"

namespace dspine {
namespace {

// A copy of the first rows of the last decode, float32 [n_tokens, n_embd].
py::array_t<float> rows(const Target & target, const float * data, py::ssize_t n_tokens) {
    if (n_tokens < 0 || n_tokens > target.n_rows()) {
        throw std::invalid_argument(std::to_string(n_tokens) + " rows wanted, the last decode had " +
                                    std::to_string(target.n_rows()));
    }
    const py::ssize_t n_embd = target.tensors()->n_embd;
    py::array_t<float> out({n_tokens, n_embd});
    std::copy(data, data + n_tokens * n_embd, out.mutable_data());
    return out;
}

}  // namespace

void bind_target(py::module_ & m) {
    m.def("devices", []() {
        std::vector<std::tuple<std::string, std::string, bool, size_t, size_t>> all;
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            ggml_backend_dev_t device = ggml_backend_dev_get(i);
            size_t n_free = 0;
            size_t n_total = 0;
            ggml_backend_dev_memory(device, &n_free, &n_total);
            const auto type = ggml_backend_dev_type(device);
            const bool computes = type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
            all.emplace_back(ggml_backend_dev_name(device), ggml_backend_dev_description(device), computes, n_free,
                             n_total);
        }
        return all;
    });
    m.def("add_rpc_server", &add_rpc_server, py::arg("endpoint"), py::call_guard<py::gil_scoped_release>());
    m.def("serve_rpc", &serve_rpc, py::arg("endpoint"), py::arg("devices"), py::arg("n_threads") = 0,
          py::call_guard<py::gil_scoped_release>());
    m.def(
        "quantized_types",
        [](const std::string & arch, const std::vector<uint32_t> & shape,
           const std::vector<std::pair<std::string, std::vector<int64_t>>> & tensors, int file_type) {
            if (shape.size() != 6) {
                throw std::invalid_argument("a shape has 6 numbers, got " + std::to_string(shape.size()));
            }
            std::vector<TensorShape> listed;
            for (const auto & [name, ne] : tensors) {
                listed.push_back({name, ne});
            }
            std::vector<std::string> names;
            for (const ggml_type type :
                 quantized_types({arch, shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]}, listed,
                                 static_cast<llama_ftype>(file_type))) {
                names.emplace_back(ggml_type_name(type));
            }
            return names;
        },
        py::arg("arch"), py::arg("shape"), py::arg("tensors"), py::arg("file_type"));
    py::class_<Target, std::shared_ptr<Target>>(m, "Target")
        .def(py::init([](const std::string & path, int32_t n_ctx, int32_t n_seq, int32_t n_batch, int32_t n_ubatch,
                         int32_t n_rollback, int32_t n_gpu_layers, int32_t n_threads, int32_t n_threads_batch,
                         const std::string & flash_attn, const std::string & cache_type_k,
                         const std::string & cache_type_v, bool use_mmap, bool hidden, bool planned,
                         int32_t n_snapshots, const std::optional<std::vector<std::string>> & devices,
                         const std::string & split_mode, const std::vector<float> & tensor_split) {
                 const py::gil_scoped_release release;
                 return std::make_shared<Target>(
                     path, TargetOptions{n_ctx, n_seq, n_batch, n_ubatch, n_rollback, n_gpu_layers, n_threads,
                                         n_threads_batch, flash_attn, cache_type_k, cache_type_v, use_mmap, hidden,
                                         planned, n_snapshots, devices, split_mode, tensor_split});
             }),
             py::arg("path"), py::kw_only(), py::arg("n_ctx") = 4096, py::arg("n_seq") = 1, py::arg("n_batch") = 512,
             py::arg("n_ubatch") = 512, py::arg("n_rollback") = 0, py::arg("n_gpu_layers") = -1,
             py::arg("n_threads") = 0, py::arg("n_threads_batch") = 0, py::arg("flash_attn") = "auto",
             py::arg("cache_type_k") = "f16", py::arg("cache_type_v") = "f16", py::arg("use_mmap") = true,
             py::arg("hidden") = false, py::arg("planned") = false, py::arg("n_snapshots") = -1,
             py::arg("devices") = py::none(), py::arg("split_mode") = "layer",
             py::arg("tensor_split") = std::vector<float>())
        .def("memory", [](Target & t) { return to_tuples(t.memory()); })
        .def_property_readonly("path", &Target::path)
        .def_property_readonly("arch", &Target::arch)
        .def_property_readonly("description",
                               [](const Target & t) {
                                   char text[256];
                                   llama_model_desc(t.model(), text, sizeof(text));
                                   return std::string(text);
                               })
        .def_property_readonly("n_vocab", &Target::n_vocab)
        .def_property_readonly("n_embd", [](const Target & t) { return t.tensors()->n_embd; })
        .def_property_readonly("n_layer", [](const Target & t) { return t.tensors()->n_layer; })
        .def_property_readonly("n_ctx_seq", &Target::n_ctx_seq)
        .def_property_readonly("n_seq", &Target::n_seq)
        .def_property_readonly("n_batch", &Target::n_batch)
        .def_property_readonly("n_threads", &Target::n_threads)
        .def_property_readonly("n_threads_batch", &Target::n_threads_batch)
        .def_property_readonly("n_rollback", &Target::n_rollback)
        .def_property_readonly("is_recurrent", &Target::is_recurrent)
        .def_property_readonly("graph_splits", &Target::graph_splits)
        .def_property_readonly("n_ctx_train", [](const Target & t) { return llama_model_n_ctx_train(t.model()); })
        .def_property_readonly("n_bytes", [](const Target & t) { return llama_model_size(t.model()); })
        .def_property_readonly("chat_template",
                               [](const Target & t) -> py::object {
                                   const char * text = llama_model_chat_template(t.model(), nullptr);
                                   return text ? py::object(py::str(text)) : py::none();
                               })
        .def_property_readonly("bos_token", [](const Target & t) { return llama_vocab_bos(t.vocab()); })
        .def_property_readonly("eos_token", [](const Target & t) { return llama_vocab_eos(t.vocab()); })
        .def("tensors", [](const Target & t) { return std::const_pointer_cast<TargetTensors>(t.tensors()); })
        .def(
            "is_end_of_generation",
            [](const Target & t, int32_t token) {
                return token >= 0 && token < t.n_vocab() && llama_vocab_is_eog(t.vocab(), token);
            },
            py::arg("token"))
        .def("tokenize", &Target::tokenize, py::arg("text"), py::kw_only(), py::arg("add_special") = true,
             py::arg("parse_special") = false)
        .def(
            "piece", [](const Target & t, int32_t token, bool special) { return py::bytes(t.piece(token, special)); },
            py::arg("token"), py::kw_only(), py::arg("special") = false)
        .def("enable_taps", &Target::enable_taps, py::arg("layers"))
        .def("length", &Target::length, py::arg("seq"))
        .def("reusable", &Target::reusable, py::arg("seq"), py::arg("n"))
        .def("truncate", &Target::truncate, py::arg("seq"), py::arg("n"))
        .def(
            "save_recurrent",
            [](const Target & t, int32_t seq) {
                std::string state;
                {
                    const py::gil_scoped_release release;
                    state = t.save_recurrent(seq);
                }
                return py::bytes(state);
            },
            py::arg("seq"))
        .def(
            "load_recurrent",
            [](Target & t, int32_t seq, const py::bytes & state, int32_t n) {
                const std::string bytes = state;
                const py::gil_scoped_release release;
                t.load_recurrent(seq, bytes, n);
            },
            py::arg("seq"), py::arg("state"), py::arg("n"))
        .def(
            "decode",
            [](Target & t, int32_t seq, const std::vector<int32_t> & tokens, int32_t n_outputs) {
                std::vector<BatchToken> batch;
                const int32_t n = static_cast<int32_t>(tokens.size());
                need_range("n_outputs", n_outputs, 0, n);
                for (int32_t i = 0; i < n; ++i) {
                    batch.push_back({tokens[static_cast<size_t>(i)], t.length(seq) + i, seq, i >= n - n_outputs});
                }
                {
                    const py::gil_scoped_release release;
                    t.decode(batch);
                }
                py::array_t<float> out({std::min(n, n_outputs), t.n_vocab()});
                for (int32_t i = 0; i < out.shape(0); ++i) {
                    const float * row = t.logits(n - static_cast<int32_t>(out.shape(0)) + i);
                    std::copy(row, row + t.n_vocab(), out.mutable_data(i, 0));
                }
                return out;
            },
            py::arg("seq"), py::arg("tokens"), py::kw_only(), py::arg("n_outputs") = 1)
        .def(
            "hidden", [](const Target & t, py::ssize_t n_tokens) { return rows(t, t.hidden(), n_tokens); },
            py::arg("n_tokens"))
        .def(
            "taps",
            [](const Target & t, py::ssize_t tap, py::ssize_t n_tokens) {
                return rows(t, t.taps(static_cast<size_t>(tap)), n_tokens);
            },
            py::arg("tap"), py::arg("n_tokens"));
}

}  // namespace dspine
