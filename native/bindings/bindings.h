// What the binding files share. Types and errors are documented in dspine_local/_native.pyi.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "base/backend.h"

namespace dspine {

namespace py = pybind11;

using FloatArray = py::array_t<float, py::array::c_style>;

template <typename T>
py::array_t<T> to_array(const std::vector<T> & values, std::vector<py::ssize_t> shape) {
    py::array_t<T> out(std::move(shape));
    std::copy(values.begin(), values.end(), out.mutable_data());
    return out;
}

// Text of a model or of llama.cpp as a Python string: bytes that are not UTF-8 become U+FFFD.
inline py::str to_text(const std::string & text) {
    return py::reinterpret_steal<py::str>(
        PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace"));
}

// Tuples of device, purpose and bytes.
inline std::vector<std::tuple<std::string, std::string, size_t>> to_tuples(const std::vector<MemoryUse> & uses) {
    std::vector<std::tuple<std::string, std::string, size_t>> out;
    for (const MemoryUse & use : uses) {
        out.emplace_back(use.device, use.part, use.n_bytes);
    }
    return out;
}

// Throws std::invalid_argument unless the array has this shape; -1 is any.
void need_shape(const py::array & array, const std::string & name, const std::vector<py::ssize_t> & shape);

void bind_errors(py::module_ & m);
void bind_files(py::module_ & m);
void bind_target(py::module_ & m);
void bind_drafter(py::module_ & m);
void bind_policy(py::module_ & m);
void bind_engine(py::module_ & m);

}  // namespace dspine
