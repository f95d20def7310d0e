#include "base/errors.h"
#include "base/log.h"
#include "base/matrix_tiles.h"
#include "bindings.h"

namespace dspine {

void bind_errors(py::module_ & m) {
    static py::exception<Error> base(m, "DSpineError", PyExc_Exception);
    static py::exception<ModelFormatError> model_format(m, "ModelFormatError", base);
    static py::exception<PairingError> pairing(m, "PairingError", base);
    static py::exception<ContextLengthError> context_length(m, "ContextLengthError", base);
    static py::exception<BackendError> backend(m, "BackendError", base);
    py::register_exception_translator([](std::exception_ptr p) {
        const auto raise = [](PyObject * type, const std::string & text) {
            PyErr_SetObject(type, to_text(text).ptr());
        };
        try {
            if (p) {
                std::rethrow_exception(p);
            }
        } catch (const FileNotFound & e) {
            raise(PyExc_FileNotFoundError, "no such file: '" + std::string(e.what()) + "'");
        } catch (const ModelFormatError & e) {
            raise(model_format.ptr(), e.what());
        } catch (const PairingError & e) {
            raise(pairing.ptr(), e.what());
        } catch (const ContextLengthError & e) {
            raise(context_length.ptr(), e.what());
        } catch (const BackendError & e) {
            raise(backend.ptr(), e.what());
        } catch (const Error & e) {
            raise(base.ptr(), e.what());
        } catch (const std::invalid_argument & e) {
            raise(PyExc_ValueError, e.what());
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
    m.def("cpu_layouts_work", &cpu_layouts_work, py::call_guard<py::gil_scoped_release>());
    m.def("set_log_verbose", &set_log_verbose, py::arg("verbose"));
    bind_errors(m);
    bind_files(m);
    bind_target(m);
    bind_drafter(m);
    bind_policy(m);
    bind_engine(m);
}
