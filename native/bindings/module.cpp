#include "bindings.h"
#include "errors.h"
#include "log.h"

namespace dspine {

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

void need_shape(const py::array & a, const std::string & name, const std::vector<py::ssize_t> & shape) {
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

}  // namespace dspine

PYBIND11_MODULE(_native, m) {
    using namespace dspine;
    m.doc() = "DSpine drafting and verification on ggml and llama.cpp.";
    install_log_sink();
    m.def("set_log_verbose", &set_log_verbose, py::arg("verbose"));
    bind_errors(m);
    bind_files(m);
    bind_target(m);
    bind_drafter(m);
    bind_engine(m);
}
