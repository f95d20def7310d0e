#include "base/errors.h"
#include "bindings.h"
#include "gguf/gguf_file.h"
#include "gguf/quantize.h"

namespace dspine {
namespace {

py::object array_to_python(const gguf_context * ctx, int64_t id) {
    const size_t n = gguf_get_arr_n(ctx, id);
    const gguf_type type = gguf_get_arr_type(ctx, id);
    py::list out;
    if (type == GGUF_TYPE_STRING) {
        for (size_t i = 0; i < n; ++i) {
            out.append(to_text(gguf_get_arr_str(ctx, id, i)));
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
        case GGUF_TYPE_STRING: return to_text(gguf_get_val_str(ctx, id));
        case GGUF_TYPE_ARRAY: return array_to_python(ctx, id);
        default: throw ModelFormatError("key '" + key + "' has an unknown GGUF type");
    }
}

}  // namespace

void bind_files(py::module_ & m) {
    py::class_<GgufTensor>(m, "TensorInfo")
        .def_property_readonly("name", [](const GgufTensor & t) { return to_text(t.name); })
        .def_property_readonly("type", [](const GgufTensor & t) { return std::string(ggml_type_name(t.type)); })
        .def_property_readonly("shape",
                               [](const GgufTensor & t) { return std::vector<int64_t>(t.ne, t.ne + t.n_dims); })
        .def_readonly("offset", &GgufTensor::offset)
        .def_readonly("n_bytes", &GgufTensor::n_bytes);
    py::class_<GgufFile>(m, "GgufFile")
        .def(py::init<std::string>(), py::arg("path"))
        .def("keys",
             [](const GgufFile & f) {
                 py::list keys;
                 for (int64_t i = 0; i < gguf_get_n_kv(f.raw()); ++i) {
                     keys.append(to_text(gguf_get_key(f.raw(), i)));
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
        [](const FloatArray & rows, const std::string & name, const std::optional<FloatArray> & importance,
           int n_threads) {
            need_shape(rows, "rows", {-1, -1});
            if (importance) {
                need_shape(*importance, "importance", {rows.shape(1)});
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
            const float * weights = importance ? importance->data() : nullptr;
            {
                const py::gil_scoped_release release;
                quantize_rows(type, src, dst, n_rows, n_per_row, weights, n_threads);
            }
            return out;
        },
        py::arg("rows"), py::arg("type_name"), py::arg("importance") = py::none(), py::arg("n_threads") = 0);
    m.def(
        "dequantize",
        [](const py::array_t<uint8_t, py::array::c_style> & rows, const std::string & name, int n_threads) {
            need_shape(rows, "rows", {-1, -1});
            const ggml_type type = parse_type(name);
            const size_t block_bytes = ggml_type_size(type);
            if (rows.shape(1) == 0 || static_cast<size_t>(rows.shape(1)) % block_bytes != 0) {
                throw std::invalid_argument("rows of " + std::to_string(rows.shape(1)) +
                                            " bytes do not divide into blocks of " + std::to_string(block_bytes) +
                                            " (" + name + ")");
            }
            const int64_t n_rows = rows.shape(0);
            const int64_t n_per_row = rows.shape(1) / static_cast<int64_t>(block_bytes) * ggml_blck_size(type);
            py::array_t<float> out({n_rows, n_per_row});
            const uint8_t * src = rows.data();
            float * dst = out.mutable_data();
            {
                const py::gil_scoped_release release;
                dequantize_rows(type, src, dst, n_rows, n_per_row, n_threads);
            }
            return out;
        },
        py::arg("rows"), py::arg("type_name"), py::arg("n_threads") = 0);
}

}  // namespace dspine
