// The only file that knows Python. Types and errors are documented in dspine_local/_native.pyi.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "drafter.h"
#include "engine.h"
#include "errors.h"
#include "gguf_file.h"
#include "log.h"
#include "quantize.h"

namespace py = pybind11;
using namespace dspine;

namespace {

py::object array_to_python(const gguf_context * ctx, int64_t id) {
    const size_t n = gguf_get_arr_n(ctx, id);
    const gguf_type type = gguf_get_arr_type(ctx, id);
    py::list out;
    if (type == GGUF_TYPE_STRING) {
        for (size_t i = 0; i < n; ++i) {
            out.append(py::str(py::bytes(gguf_get_arr_str(ctx, id, i)).attr("decode")("utf-8", "replace")));
        }
        return std::move(out);
    }
    const void * data = gguf_get_arr_data(ctx, id);
    for (size_t i = 0; i < n; ++i) {
        switch (type) {
            case GGUF_TYPE_UINT8: out.append(static_cast<const uint8_t *>(data)[i]); break;
            case GGUF_TYPE_INT8: out.append(static_cast<const int8_t *>(data)[i]); break;
            case GGUF_TYPE_UINT16: out.append(static_cast<const uint16_t *>(data)[i]); break;
            case GGUF_TYPE_INT16: out.append(static_cast<const int16_t *>(data)[i]); break;
            case GGUF_TYPE_UINT32: out.append(static_cast<const uint32_t *>(data)[i]); break;
            case GGUF_TYPE_INT32: out.append(static_cast<const int32_t *>(data)[i]); break;
            case GGUF_TYPE_FLOAT32: out.append(static_cast<const float *>(data)[i]); break;
            case GGUF_TYPE_UINT64: out.append(static_cast<const uint64_t *>(data)[i]); break;
            case GGUF_TYPE_INT64: out.append(static_cast<const int64_t *>(data)[i]); break;
            case GGUF_TYPE_FLOAT64: out.append(static_cast<const double *>(data)[i]); break;
            case GGUF_TYPE_BOOL: out.append(static_cast<const int8_t *>(data)[i] != 0); break;
            default: throw ModelFormatError("nested GGUF arrays are not supported");
        }
    }
    return std::move(out);
}

py::object value_to_python(const GgufFile & file, const std::string & key) {
    const gguf_context * ctx = file.raw();
    const int64_t id = gguf_find_key(ctx, key.c_str());
    if (id < 0) {
        throw py::key_error(key);
    }
    switch (gguf_get_kv_type(ctx, id)) {
        case GGUF_TYPE_UINT8: return py::int_(gguf_get_val_u8(ctx, id));
        case GGUF_TYPE_INT8: return py::int_(gguf_get_val_i8(ctx, id));
        case GGUF_TYPE_UINT16: return py::int_(gguf_get_val_u16(ctx, id));
        case GGUF_TYPE_INT16: return py::int_(gguf_get_val_i16(ctx, id));
        case GGUF_TYPE_UINT32: return py::int_(gguf_get_val_u32(ctx, id));
        case GGUF_TYPE_INT32: return py::int_(gguf_get_val_i32(ctx, id));
        case GGUF_TYPE_FLOAT32: return py::float_(gguf_get_val_f32(ctx, id));
        case GGUF_TYPE_UINT64: return py::int_(gguf_get_val_u64(ctx, id));
        case GGUF_TYPE_INT64: return py::int_(gguf_get_val_i64(ctx, id));
        case GGUF_TYPE_FLOAT64: return py::float_(gguf_get_val_f64(ctx, id));
        case GGUF_TYPE_BOOL: return py::bool_(gguf_get_val_bool(ctx, id));
        case GGUF_TYPE_STRING: return py::bytes(gguf_get_val_str(ctx, id)).attr("decode")("utf-8", "replace");
        case GGUF_TYPE_ARRAY: return array_to_python(ctx, id);
        default: throw ModelFormatError("key '" + key + "' has an unknown GGUF type");
    }
}

void bind_errors(py::module_ & m) {
    static py::exception<Error> base(m, "DSpineError", PyExc_Exception);
    py::register_exception<ModelFormatError>(m, "ModelFormatError", base);
    py::register_exception<PairingError>(m, "PairingError", base);
    py::register_exception<ContextLengthError>(m, "ContextLengthError", base);
    py::register_exception<BackendError>(m, "BackendError", base);
    py::register_exception_translator([](std::exception_ptr p) {
        try {
            if (p) {
                std::rethrow_exception(p);
            }
        } catch (const FileNotFound & e) {
            py::set_error(PyExc_FileNotFoundError, ("no such file: '" + std::string(e.what()) + "'").c_str());
        }
    });
}

void bind_files(py::module_ & m) {
    py::class_<GgufTensor>(m, "TensorInfo")
        .def_readonly("name", &GgufTensor::name)
        .def_property_readonly("type", [](const GgufTensor & t) { return std::string(ggml_type_name(t.type)); })
        .def_property_readonly("shape", [](const GgufTensor & t) { return std::vector<int64_t>(t.ne, t.ne + t.n_dims); })
        .def_readonly("n_bytes", &GgufTensor::n_bytes);
    py::class_<GgufFile>(m, "GgufFile")
        .def(py::init<std::string>(), py::arg("path"))
        .def("keys",
             [](const GgufFile & f) {
                 std::vector<std::string> keys;
                 for (int64_t i = 0; i < gguf_get_n_kv(f.raw()); ++i) {
                     keys.emplace_back(gguf_get_key(f.raw(), i));
                 }
                 return keys;
             })
        .def("get", &value_to_python, py::arg("key"))
        .def("tensors", &GgufFile::tensors);
    m.def(
        "vocab_sha256",
        [](const std::string & path) {
            // One buffer, hashed by Python's hashlib: no second implementation of SHA-256.
            std::string all;
            for (const std::string & token : GgufFile(path).str_array("tokenizer.ggml.tokens")) {
                const uint32_t n = static_cast<uint32_t>(token.size());
                for (int shift = 0; shift < 32; shift += 8) {
                    all.push_back(static_cast<char>((n >> shift) & 0xff));
                }
                all += token;
            }
            return py::module_::import("hashlib").attr("sha256")(py::bytes(all)).attr("hexdigest")();
        },
        py::arg("path"));
    m.def(
        "type_layout",
        [](const std::string & name) {
            const ggml_type type = parse_type(name);
            return std::make_pair(ggml_blck_size(type), ggml_type_size(type));
        },
        py::arg("type_name"));
    m.def(
        "quantize",
        [](const py::array_t<float, py::array::c_style> & rows, const std::string & name, int n_threads) {
            if (rows.ndim() != 2) {
                throw std::invalid_argument("rows must be float32 [n_rows, n_per_row], got " +
                                            std::to_string(rows.ndim()) + " dimensions");
            }
            const ggml_type type = parse_type(name);
            if (rows.shape(1) == 0 || rows.shape(1) % ggml_blck_size(type) != 0) {
                throw std::invalid_argument("rows of " + std::to_string(rows.shape(1)) +
                                            " values do not divide into blocks of " +
                                            std::to_string(ggml_blck_size(type)) + " (" + name + ")");
            }
            py::array_t<uint8_t> out({rows.shape(0), py::ssize_t(ggml_row_size(type, rows.shape(1)))});
            const float * src = rows.data();
            uint8_t * dst = out.mutable_data();
            const int64_t n_rows = rows.shape(0);
            const int64_t n_per_row = rows.shape(1);
            {
                const py::gil_scoped_release release;
                quantize_rows(type, src, dst, n_rows, n_per_row, n_threads);
            }
            return out;
        },
        py::arg("rows"), py::arg("type_name"), py::arg("n_threads") = 0);
}

template <typename T>
py::array_t<T> to_array(const std::vector<T> & values, std::vector<py::ssize_t> shape) {
    py::array_t<T> out(std::move(shape));
    std::copy(values.begin(), values.end(), out.mutable_data());
    return out;
}

using FloatArray = py::array_t<float, py::array::c_style>;

void need_shape(const py::array & a, const std::string & name, std::vector<py::ssize_t> shape) {
    bool same = a.ndim() == static_cast<py::ssize_t>(shape.size());
    for (size_t i = 0; same && i < shape.size(); ++i) {
        same = shape[i] < 0 || a.shape(static_cast<py::ssize_t>(i)) == shape[i];
    }
    if (!same) {
        std::string found, wanted;
        for (py::ssize_t i = 0; i < a.ndim(); ++i) {
            found += (i ? ", " : "") + std::to_string(a.shape(i));
        }
        for (size_t i = 0; i < shape.size(); ++i) {
            wanted += (i ? ", " : "") + (shape[i] < 0 ? "*" : std::to_string(shape[i]));
        }
        throw std::invalid_argument(name + " has shape [" + found + "], expected [" + wanted + "]");
    }
}

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

void bind_drafter(py::module_ & m) {
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
                         int n_threads, const std::string & cache_type, const std::string & order) {
                 const py::gil_scoped_release release;
                 return std::make_shared<Drafter>(path, std::move(target),
                                                  DrafterOptions{n_seq, n_ctx, n_threads, cache_type, order});
             }),
             py::arg("path"), py::arg("target"), py::kw_only(), py::arg("n_seq") = 1, py::arg("n_ctx") = 4096,
             py::arg("n_threads") = 0, py::arg("cache_type") = "f16", py::arg("order") = "auto")
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
        .def("length", &Drafter::length, py::arg("seq"))
        .def("reusable", &Drafter::reusable, py::arg("seq"), py::arg("n"))
        .def("truncate", &Drafter::truncate, py::arg("seq"), py::arg("n"))
        .def(
            "commit",
            [](Drafter & d, int32_t seq, const FloatArray & features) {
                const size_t n_embd = static_cast<size_t>(d.config().n_embd);
                need_shape(features, "features", {-1, static_cast<py::ssize_t>(d.config().n_taps() * d.config().n_embd)});
                FeatureRows rows = {seq, static_cast<int32_t>(features.shape(0)), {},
                                    static_cast<size_t>(features.shape(1))};
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
}

// Any Python function that guesses tokens, as a source of drafts: for tests of the loop, and for lookup drafters.
class CallbackDrafter final : public DraftSource {
  public:
    CallbackDrafter(py::function draft, int32_t n_seq, int32_t max_draft, std::vector<int32_t> taps)
        : draft_(std::move(draft)), max_draft_(max_draft), taps_(std::move(taps)), lengths_(static_cast<size_t>(n_seq), 0) {}

    ~CallbackDrafter() override {
        const py::gil_scoped_acquire acquire;
        draft_ = py::function();
    }

    int32_t max_draft() const override { return max_draft_; }
    const std::vector<int32_t> & taps() const override { return taps_; }
    int32_t length(int32_t seq) const override { return lengths_.at(static_cast<size_t>(seq)); }
    int32_t reusable(int32_t seq, int32_t n) const override { return std::min(n, length(seq)); }
    void truncate(int32_t seq, int32_t n) override { lengths_.at(static_cast<size_t>(seq)) = n; }

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

void bind_target(py::module_ & m) {
    py::class_<Target, std::shared_ptr<Target>>(m, "Target")
        .def(py::init([](const std::string & path, int32_t n_ctx, int32_t n_seq, int32_t n_batch, int32_t n_ubatch,
                         int32_t n_rollback, int32_t n_gpu_layers, int32_t n_threads, int32_t n_threads_batch,
                         const std::string & flash_attn, const std::string & cache_type_k, const std::string & cache_type_v,
                         bool use_mmap) {
                 const py::gil_scoped_release release;
                 return std::make_shared<Target>(
                     path, TargetOptions{n_ctx, n_seq, n_batch, n_ubatch, n_rollback, n_gpu_layers, n_threads,
                                         n_threads_batch, flash_attn, cache_type_k, cache_type_v, use_mmap});
             }),
             py::arg("path"), py::kw_only(), py::arg("n_ctx") = 4096, py::arg("n_seq") = 1, py::arg("n_batch") = 512,
             py::arg("n_ubatch") = 512, py::arg("n_rollback") = 0, py::arg("n_gpu_layers") = -1, py::arg("n_threads") = 0,
             py::arg("n_threads_batch") = 0, py::arg("flash_attn") = "auto", py::arg("cache_type_k") = "f16",
             py::arg("cache_type_v") = "f16", py::arg("use_mmap") = true)
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
        .def_property_readonly("n_threads", &Target::n_threads)
        .def_property_readonly("is_recurrent", &Target::is_recurrent)
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
        .def("is_end_of_generation",
             [](const Target & t, int32_t token) {
                 return token >= 0 && token < t.n_vocab() && llama_vocab_is_eog(t.vocab(), token);
             },
             py::arg("token"))
        .def("tokenize", &Target::tokenize, py::arg("text"), py::kw_only(), py::arg("add_special") = true,
             py::arg("parse_special") = false)
        .def("piece", [](const Target & t, int32_t token, bool special) { return py::bytes(t.piece(token, special)); },
             py::arg("token"), py::kw_only(), py::arg("special") = false)
        .def("enable_taps", &Target::enable_taps, py::arg("layers"))
        .def("length", &Target::length, py::arg("seq"))
        .def("reusable", &Target::reusable, py::arg("seq"), py::arg("n"))
        .def("truncate", &Target::truncate, py::arg("seq"), py::arg("n"))
        .def(
            "decode",
            [](Target & t, int32_t seq, const std::vector<int32_t> & tokens, int32_t n_outputs) {
                std::vector<BatchToken> batch;
                const int32_t n = static_cast<int32_t>(tokens.size());
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
            "taps",
            [](const Target & t, py::ssize_t tap, py::ssize_t n_tokens) {
                const py::ssize_t n_embd = t.tensors()->n_embd;
                py::array_t<float> out({n_tokens, n_embd});
                const float * rows = t.taps(static_cast<size_t>(tap));
                std::copy(rows, rows + n_tokens * n_embd, out.mutable_data());
                return out;
            },
            py::arg("tap"), py::arg("n_tokens"));
}

void bind_engine(py::module_ & m) {
    py::class_<DraftSource, std::shared_ptr<DraftSource>>(m, "DraftSource")
        .def_property_readonly("max_draft", &DraftSource::max_draft);
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
        .def_readonly("drafted_at", &RequestStats::drafted_at)
        .def_readonly("accepted_at", &RequestStats::accepted_at)
        .def_readonly("prefill_us", &RequestStats::prefill_us)
        .def_readonly("draft_us", &RequestStats::draft_us)
        .def_readonly("verify_us", &RequestStats::verify_us)
        .def_readonly("commit_us", &RequestStats::commit_us)
        .def_readonly("round_us", &RequestStats::round_us);
    py::class_<StepEvent>(m, "StepEvent")
        .def_readonly("id", &StepEvent::id)
        .def_readonly("tokens", &StepEvent::tokens)
        .def_property_readonly("finish_reason", [](const StepEvent & e) { return finish_name(e.finish); })
        .def_readonly("error", &StepEvent::error)
        .def_readonly("stats", &StepEvent::stats);
    py::class_<CallbackDrafter, DraftSource, std::shared_ptr<CallbackDrafter>>(m, "CallbackDrafter")
        .def(py::init<py::function, int32_t, int32_t, std::vector<int32_t>>(), py::arg("draft"), py::kw_only(),
             py::arg("n_seq") = 1, py::arg("max_draft") = 15, py::arg("taps") = std::vector<int32_t>{})
        .def("length", &CallbackDrafter::length, py::arg("seq"));
    py::class_<Engine>(m, "Engine")
        .def(py::init([](std::shared_ptr<Target> target, std::shared_ptr<DraftSource> drafter, int32_t n_draft) {
                 const py::gil_scoped_release release;
                 return std::make_unique<Engine>(std::move(target), std::move(drafter), EngineOptions{n_draft});
             }),
             py::arg("target"), py::arg("drafter") = py::none(), py::kw_only(), py::arg("n_draft") = 7)
        .def(
            "submit",
            [](Engine & e, std::vector<int32_t> tokens, const SamplingParams & sampling, int32_t max_tokens,
               std::vector<int32_t> stop_tokens, int32_t n_draft, bool cache_prompt) {
                const py::gil_scoped_release release;
                return e.submit({std::move(tokens), sampling, max_tokens, std::move(stop_tokens), n_draft, cache_prompt});
            },
            py::arg("tokens"), py::arg("sampling"), py::kw_only(), py::arg("max_tokens") = -1,
            py::arg("stop_tokens") = std::vector<int32_t>{}, py::arg("n_draft") = -1, py::arg("cache_prompt") = true)
        .def("cancel", &Engine::cancel, py::arg("id"), py::call_guard<py::gil_scoped_release>())
        .def("has_work", &Engine::has_work, py::call_guard<py::gil_scoped_release>())
        .def("step", &Engine::step, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("n_slots", &Engine::n_slots)
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

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "DSpine drafting and verification on ggml and llama.cpp.";
    install_log_sink();
    bind_errors(m);
    m.def("set_log_verbose", &set_log_verbose, py::arg("verbose"));
    bind_files(m);
    bind_target(m);
    bind_engine(m);
    bind_drafter(m);
}
